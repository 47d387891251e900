#include "densify_plan.h"

#include <algorithm>
#include <iterator>

#include "decode_plan.h"
#include "densify_rates.h"

namespace block_sparse {
namespace {

const GpuRates& gpu_rates(const Gpu& gpu) {
  return *std::find_if(std::begin(kGpuRates), std::end(kGpuRates) - 1, [&](const GpuRates& rates) {
    return rates.major == gpu.major && (rates.minor == gpu.minor || rates.minor == -1);
  });
}

double element_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

double dense_rate(const Product& product, const GpuRates& rates) {
  switch (product.dtype) {
    case DType::kFloat64:
      return rates.float64;
    case DType::kFloat32:
      return product.tf32 ? rates.tf32 : rates.float32;
    default:
      return rates.half;
  }
}

// Our time over that of the dense product, from rate fractions: linear in the density between the measured ones.
double relative_time(const Fractions& fractions, double density) {
  double before = 0, time_before = 0, slope = 0;
  for (size_t i = 0; i < fractions.size(); ++i) {
    const double time = kMeasuredDensities[i] / fractions[i];
    slope = (time - time_before) / (kMeasuredDensities[i] - before);
    if (density <= kMeasuredDensities[i]) break;
    before = kMeasuredDensities[i];
    time_before = time;
  }
  return time_before + slope * (density - before);
}

// The same for a product that a tiled kernel serves.
double tiled_relative_time(const Product& product, const GpuRates& rates, double density) {
  const int row = int(product.op);
  const int side = int(std::find(std::begin(kRateSides), std::end(kRateSides), piece_side(product.geometry)) -
                       std::begin(kRateSides));
  if (product.kernel == Kernel::kHopper) return relative_time(kHopper[row][side], density);
  if (product.dtype != DType::kFloat32) return relative_time(kPortableHalf[row][side], density) / rates.portable_half;
  if (product.tf32) return relative_time(kPortableTF32[row][side], density) / rates.portable_half;
  return relative_time(kPortableFloat32[row][side], density) / rates.portable_float32;
}

// Tokens that our kernel pays for at least: those of a full wave of tiles.
double paid_tokens(const Product& product, const Gpu& gpu) {
  const double tokens = double(product.tokens);
  if (product.op == Operator::kWeightGradient) return tokens;  // its sums, not its tiles, grow with T
  const Geometry& geometry = product.geometry;
  const int64_t features = product.op == Operator::kForward ? geometry.out_features : geometry.in_features;
  // float32 has smaller tiles where outputs are few (sums_in_two_levels in cuda_kernels.cpp).
  const double outputs = product.dtype == DType::kFloat32 && !product.tf32 ? kWaveOutputs / 2 : kWaveOutputs;
  return std::max(tokens, outputs * gpu.multiprocessors / double(features));
}

// `stored`: elements of the blocks. A thread block reads a block's tokens once for all its rows.
double decode_seconds(const Product& product, const Gpu& gpu, double memory, double stored) {
  constexpr double kElementSize = 2;
  const Direction direction = product.op == Operator::kForward ? Direction::kForward : Direction::kInputGradient;
  const DecodePlan plan = plan_decode(direction, product.geometry, product.tokens, gpu.multiprocessors);
  const double tokens = kElementSize * stored * double(product.tokens) / plan.tile.rows;
  return kElementSize * stored / memory + tokens / (kDecodeTokenRate * memory) + kDecodeRampSeconds;
}

}  // namespace

PlanSeconds predict_seconds(const Product& product, const Gpu& gpu) {
  const GpuRates& rates = gpu_rates(gpu);
  const Geometry& geometry = product.geometry;
  const double size = element_size(product.dtype);
  const double tokens = double(product.tokens);
  const double matrix = double(geometry.out_features) * double(geometry.in_features);
  const double stored = double(geometry.nnz) * double(geometry.block_height) * double(geometry.block_width);
  const double rate = dense_rate(product, rates);
  const double token_bytes = size * tokens * double(geometry.out_features + geometry.in_features);

  double blocks;
  if (product.kernel == Kernel::kDecode) {
    blocks = decode_seconds(product, gpu, rates.memory, stored);
  } else if (product.dtype == DType::kFloat64 || piece_side(geometry) == 0) {
    const double generic = product.dtype == DType::kFloat64 ? kGenericFloat64Rate : kGenericRate;
    blocks = 2 * tokens * stored / (generic * gpu.multiprocessors);
  } else {
    blocks = 2 * paid_tokens(product, gpu) * matrix / rate * tiled_relative_time(product, rates, stored / matrix);
  }
  if (product.kernel != Kernel::kDecode) {
    blocks = std::max(blocks, (token_bytes + size * stored) / rates.memory) + kRampSeconds;
  }

  const double dense =
      std::max(2 * tokens * matrix / rate, (token_bytes + size * matrix) / rates.memory) + kLaunchSeconds;
  // Scattering writes the whole matrix and reads the blocks; gathering reads and writes the blocks.
  const double copied = product.op == Operator::kWeightGradient ? 2 * stored : matrix + stored;
  double densify = dense + size * copied / rates.memory + kLaunchSeconds;
  if (product.activation != Activation::kNone) {
    densify += 2 * size * tokens * double(geometry.out_features) / rates.memory + kLaunchSeconds;
  }
  return {blocks, densify};
}

int64_t densify_bytes(const Product& product) {
  return product.geometry.out_features * product.geometry.in_features * int64_t(element_size(product.dtype));
}

bool chooses_densify(const Product& product, const Gpu& gpu, DensifyMode mode) {
  constexpr double kLeastGain = 1.05;
  constexpr int64_t kMemoryShare = 16;
  constexpr double kHostSeconds = 10e-6;  // of PyTorch's further calls, which a short product does not hide
  constexpr int64_t kDecodeTokens = 16;   // so few read the weight once: they shall not write one
  if (mode == DensifyMode::kNever || product.tokens == 0 || densify_bytes(product) > gpu.memory / kMemoryShare) {
    return false;
  }
  if (mode == DensifyMode::kAlways) return true;
  if (product.tokens <= kDecodeTokens) return false;
  const PlanSeconds seconds = predict_seconds(product, gpu);
  return kLeastGain * seconds.densify + kHostSeconds < seconds.blocks;
}

}  // namespace block_sparse
