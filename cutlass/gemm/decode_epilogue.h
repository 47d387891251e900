// Adds the warps' sums of one tile in the order of the warps, then bias and activation, and stores.
#pragma once

#include "gemm/epilogue_function.h"

namespace block_sparse {

struct DecodeOutput {
  const void* bias;  // [features] or null
  void* output;      // [T, features]
  int features;      // O (forward) or I
  int tokens;        // T
  EpilogueActivation activation;
  bool paired;  // 4-byte pairs of the output are aligned
};

template <class Element, int kRows, int kTokenTiles>
struct DecodeEpilogue {
  // Sums of a warp, [tokens][kPitch]: 4 floats more than features, so that a fragment meets every bank.
  static constexpr int kPitch = kRows + 4;
  static constexpr int kWarpFloats = 8 * kTokenTiles * kPitch;
  static constexpr int kPair = 2;  // features of a thread: short code, because it runs once and from a cold cache
  static constexpr int kThreadsPerToken = kRows / kPair;
  using Sums = float[kRows / 16][kTokenTiles][4];

  // All warps call it; `partials` is free for everybody's writes after the barrier in here.
  static CUTE_DEVICE void run(const DecodeOutput& out, const Sums& sums, float* partials, int feature) {
    const int thread = threadIdx.x, threads = blockDim.x, lane = thread % 32;
    // A thread keeps its features in every pass: kThreadsPerToken divides the number of threads.
    const int in_piece = thread % kThreadsPerToken * kPair;
    const int first = feature + in_piece;
    const int valid = min(out.features - first, kPair);
    float bias[kPair];
    CUTE_UNROLL
    for (int i = 0; i < kPair; ++i) {
      bias[i] = out.bias != nullptr && i < valid ? float(static_cast<const Element*>(out.bias)[first + i]) : 0.f;
    }
    __syncthreads();  // nobody reads a ring any more
    write(sums, partials + thread / 32 * kWarpFloats, lane);
    __syncthreads();
    CUTE_NO_UNROLL
    for (int token = thread / kThreadsPerToken; token < out.tokens; token += threads / kThreadsPerToken) {
      float values[kPair] = {};
      const float* partial = partials + token * kPitch + in_piece;
#pragma unroll 4
      for (int warp = 0; warp < threads / 32; ++warp, partial += kWarpFloats) {
        const float2 pair = *reinterpret_cast<const float2*>(partial);
        values[0] += pair.x, values[1] += pair.y;
      }
      apply_epilogue(values, bias, out.activation);
      store(static_cast<Element*>(out.output) + int64_t(token) * out.features + first, values, valid, out.paired);
    }
  }

 private:
  static CUTE_DEVICE void write(const Sums& sums, float* partial, int lane) {
    CUTE_UNROLL
    for (int m = 0; m < kRows / 16; ++m) {
      CUTE_UNROLL
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {  // i: feature 8 higher, token 1 higher
          const int token = 8 * tile + lane % 4 * 2 + i % 2;
          partial[token * kPitch + 16 * m + i / 2 * 8 + lane / 4] = sums[m][tile][i];
        }
      }
    }
  }

  static CUTE_DEVICE void store(Element* global, const float (&values)[kPair], int valid, bool paired) {
    cute::array_aligned<Element, kPair> converted;
    CUTE_UNROLL
    for (int i = 0; i < kPair; ++i) converted[i] = Element(values[i]);
    if (paired && valid == kPair) {
      *reinterpret_cast<uint32_t*>(global) = *reinterpret_cast<const uint32_t*>(converted.data());
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kPair; ++i) {
        if (i < valid) global[i] = converted[i];
      }
    }
  }
};

}  // namespace block_sparse
