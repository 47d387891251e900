// What happens between the accumulator and memory.
#pragma once

#include <cute/tensor.hpp>

namespace block_sparse {

enum class EpilogueActivation { kNone, kRelu, kGelu, kGeluTanh, kSilu };

template <class Sum>
CUTE_DEVICE Sum activate(Sum x, EpilogueActivation activation) {
  switch (activation) {
    case EpilogueActivation::kRelu:
      return x < Sum(0) ? Sum(0) : x;  // keeps NaN
    case EpilogueActivation::kGelu:
      return Sum(0.5) * x * (Sum(1) + erf(x * Sum(0.70710678118654752)));
    case EpilogueActivation::kGeluTanh:
      return Sum(0.5) * x * (Sum(1) + tanh(Sum(0.79788456080286536) * (x + Sum(0.044715) * x * x * x)));
    case EpilogueActivation::kSilu:
      return x / (Sum(1) + exp(-x));
    default:
      return x;
  }
}

// Bias, then activation, on a vector of neighbouring outputs. The activation is a run-time switch, uniform over the
// grid: the number of compiled kernels does not depend on the number of epilogues.
template <int kVector>
CUTE_DEVICE void apply_epilogue(float (&values)[kVector], const float (&bias)[kVector], EpilogueActivation activation) {
  CUTE_UNROLL
  for (int i = 0; i < kVector; ++i) values[i] += bias[i];
  if (activation == EpilogueActivation::kNone) return;
  CUTE_UNROLL
  for (int i = 0; i < kVector; ++i) values[i] = activate(values[i], activation);
}

// Stores the first `valid` of a vector of outputs; 16-byte stores when the vector is whole and its address allows it.
template <class Output, int kVector>
CUTE_DEVICE void store_vector(Output* global, const float (&values)[kVector], int valid, bool aligned) {
  cute::array_aligned<Output, kVector> converted;
  CUTE_UNROLL
  for (int i = 0; i < kVector; ++i) converted[i] = Output(values[i]);
  if (aligned && valid == kVector) {
    CUTE_UNROLL
    for (int i = 0; i < int(kVector * sizeof(Output) / 16); ++i) {
      reinterpret_cast<uint4*>(global)[i] = reinterpret_cast<const uint4*>(converted.data())[i];
    }
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kVector; ++i) {
      if (i < valid) global[i] = converted[i];
    }
  }
}

// Adds what a whole vector of outputs holds in memory.
template <class Output, int kVector>
CUTE_DEVICE void add_vector(const Output* global, float (&values)[kVector], bool aligned) {
  cute::array_aligned<Output, kVector> before;
  if (aligned) {
    CUTE_UNROLL
    for (int i = 0; i < int(kVector * sizeof(Output) / 16); ++i) {
      reinterpret_cast<uint4*>(before.data())[i] = reinterpret_cast<const uint4*>(global)[i];
    }
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kVector; ++i) before[i] = global[i];
  }
  CUTE_UNROLL
  for (int i = 0; i < kVector; ++i) values[i] += float(before[i]);
}

// Hands a warp's accumulator to `visit(row, column, values)` in vectors of kVector neighbours. The tile goes through
// shared memory, so that global stores are whole vectors and the loop over them needs no accumulator in registers.
template <int kM, int kN>
struct EpilogueStaging {
  static constexpr int kPitch = kN + 8;  // float; 8 words more, so that the rows of a fragment fall into other banks
  static constexpr int kFloats = kM * kPitch;

  template <int kVector, class Accumulator, class Visit>
  static CUTE_DEVICE void for_each_vector(const Accumulator& accumulator, float* staging, int lane, Visit visit) {
    using namespace cute;
    auto sC =
        make_tensor(make_smem_ptr(staging), Layout<Shape<Int<kM>, Int<kN>>, Stride<Int<kPitch>, _1>>{});  // (kM, kN)
    copy(accumulator.tCrC, typename Accumulator::Mma{}.get_slice(lane).partition_C(sC));
    __syncwarp();
    constexpr int kLanesPerRow = kN / kVector;
    constexpr int kRowsPerPass = 32 / kLanesPerRow;
    static_assert(kLanesPerRow <= 32);
    const int column = lane % kLanesPerRow * kVector;
#pragma unroll 4
    for (int pass = 0; pass < kM / kRowsPerPass; ++pass) {
      int row = pass * kRowsPerPass + lane / kLanesPerRow;
      alignas(16) float values[kVector];
      CUTE_UNROLL
      for (int i = 0; i < kVector; i += 4) {
        *reinterpret_cast<float4*>(values + i) = *reinterpret_cast<const float4*>(staging + row * kPitch + column + i);
      }
      visit(row, column, values);
    }
  }
};

}  // namespace block_sparse
