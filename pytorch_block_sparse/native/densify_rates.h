// Measured rates, from which densify_plan.cpp predicts times: plain tables, to be updated by measurement
// (`benchmark --peer blocks --peer densify` times both plans). Host only.
#pragma once

#include <array>

namespace block_sparse {

// What one kind of GPU reaches.
struct GpuRates {
  int major;  // compute capability
  int minor;  // -1: any
  // cuBLAS on large matrices, flop/s
  double half;  // bfloat16 and float16
  double tf32;
  double float32;
  double float64;
  double memory;  // byte/s, read and written
  // What the portable kernels' fractions are multiplied by here: in bfloat16, float16 and TF32, and in float32.
  double portable_half;
  double portable_float32;
};

// The H200's are measured. The others are guesses: data sheet figures times what the H200 reaches of its own. cuBLAS
// runs on mma.sync there, as our portable kernels do; on the H200 it has WGMMA, which is 1.6 times as fast. Only
// compute capability 8.0 has TF32 units that beat its float32 ones by far, which three TF32 products need.
constexpr GpuRates kGpuRates[] = {
    {9, 0, 750e12, 390e12, 51e12, 55e12, 3.3e12, 1.0, 1.0},     // H200
    {10, -1, 1500e12, 750e12, 65e12, 32e12, 5.5e12, 0.5, 0.8},  // B200
    {8, 0, 240e12, 120e12, 18e12, 17e12, 1.4e12, 1.6, 1.6},     // A100
    {-1, -1, 120e12, 60e12, 40e12, 1e12, 0.7e12, 1.6, 0.3},     // workstation GPUs
};

// Rate fraction: density x (time of dense cuBLAS) / (time of our kernel), where both have many waves of work: T = 8192,
// I = 4096, O = 14336 on the H200.
constexpr std::array<double, 4> kMeasuredDensities{0.1, 0.25, 0.5, 1.0};
using Fractions = std::array<double, 4>;  // at these densities
using SideFractions = Fractions[4];       // of blocks whose sides are both multiples of 16, 32, 64, 128
constexpr int kRateSides[] = {16, 32, 64, 128};

// Hopper's kernels, bfloat16 (float16 is alike); by operator: forward, input gradient, weight gradient.
constexpr SideFractions kHopper[3] = {
    {{0.16, 0.31, 0.50, 0.74}, {0.39, 0.49, 0.64, 0.98}, {0.67, 0.80, 0.89, 0.99}, {0.74, 0.92, 0.98, 0.99}},
    {{0.16, 0.33, 0.51, 0.80}, {0.36, 0.46, 0.64, 0.99}, {0.63, 0.73, 0.84, 1.00}, {0.73, 0.86, 0.95, 1.00}},
    {{0.13, 0.27, 0.48, 0.96}, {0.39, 0.41, 0.62, 0.97}, {0.65, 0.79, 0.91, 0.99}, {0.80, 0.90, 0.97, 0.98}},
};

// The portable kernels: benchmarks/results/h200_sm80_path.json; density 1 for bfloat16 at O = I = T = 4096, blocks of
// 32 guessed from their neighbours.
constexpr SideFractions kPortableHalf[3] = {
    {{0.082, 0.116, 0.164, 0.27},
     {0.173, 0.222, 0.264, 0.33},
     {0.286, 0.351, 0.381, 0.42},
     {0.295, 0.374, 0.397, 0.44}},
    {{0.076, 0.104, 0.147, 0.25},
     {0.193, 0.228, 0.270, 0.32},
     {0.339, 0.369, 0.383, 0.41},
     {0.395, 0.445, 0.458, 0.49}},
    {{0.092, 0.104, 0.125, 0.17},
     {0.227, 0.274, 0.305, 0.34},
     {0.319, 0.403, 0.407, 0.46},
     {0.404, 0.470, 0.537, 0.54}},
};
// At density 1 measured for blocks of 16 and 64 only.
constexpr SideFractions kPortableTF32[3] = {
    {{0.102, 0.141, 0.182, 0.27},
     {0.193, 0.235, 0.264, 0.31},
     {0.311, 0.361, 0.372, 0.38},
     {0.320, 0.366, 0.394, 0.41}},
    {{0.102, 0.135, 0.173, 0.27},
     {0.208, 0.236, 0.260, 0.30},
     {0.303, 0.319, 0.318, 0.33},
     {0.365, 0.410, 0.428, 0.44}},
    {{0.196, 0.227, 0.238, 0.26},
     {0.302, 0.347, 0.385, 0.42},
     {0.379, 0.480, 0.501, 0.56},
     {0.555, 0.628, 0.668, 0.69}},
};
constexpr SideFractions kPortableFloat32[3] = {
    {{0.538, 0.657, 0.820, 0.90},
     {0.751, 0.814, 0.883, 0.91},
     {1.038, 1.081, 1.097, 1.10},
     {1.047, 1.112, 1.138, 1.14}},
    {{0.562, 0.665, 0.818, 0.90},
     {0.760, 0.807, 0.862, 0.90},
     {0.987, 0.993, 0.997, 1.00},
     {1.144, 1.190, 1.191, 1.19}},
    {{0.517, 0.588, 0.624, 0.65},
     {0.689, 0.770, 0.856, 0.88},
     {0.744, 0.940, 1.011, 1.08},
     {0.974, 1.073, 1.097, 1.10}},
};

// The kernel for few tokens: it streams the blocks, and each thread block its lines' tokens, from L2 for the most part.
// benchmarks/tokens.py measures it.
constexpr double kDecodeRampSeconds = 3e-6;
constexpr double kDecodeTokenRate = 1.5;  // bytes of tokens a second, of the memory's rate

// The generic kernel: flop/s of a multiprocessor.
constexpr double kGenericRate = 14e9;
constexpr double kGenericFloat64Rate = 8e9;

// Forward and input gradient of a tiled kernel: no time is shorter than that of one full wave of tiles, which computes
// so many outputs a multiprocessor. Its beginning and end come on top.
constexpr double kWaveOutputs = 32768;
constexpr double kRampSeconds = 8e-6;

constexpr double kLaunchSeconds = 5e-6;  // a kernel of PyTorch's or a copy, with its share of the host's work

}  // namespace block_sparse
