// Arithmetic of a kernel: the element in memory, the operand of the matrix instruction, how one becomes the other, and
// how products are summed.
//
//   kProducts   matrix instructions for one product of operands
//   kSumSteps   instructions along K that the matrix unit sums before an ordinary addition (kProducts > 1)
//   kTwoLevels  whether a second accumulator takes over the sum of every few stages
#pragma once

#include <cute/tensor.hpp>

namespace block_sparse {

struct BFloat16Math {
  using Element = cutlass::bfloat16_t;
  using Operand = cutlass::bfloat16_t;
  using Atom = cute::SM80_16x8x16_F32BF16BF16F32_TN;
  static constexpr int kInstructionK = 16;
  static constexpr int kProducts = 1;
  static constexpr int kSumSteps = 1;
  static constexpr bool kTwoLevels = false;
};

struct Float16Math {
  using Element = cutlass::half_t;
  using Operand = cutlass::half_t;
  using Atom = cute::SM80_16x8x16_F32F16F16F32_TN;
  static constexpr int kInstructionK = 16;
  static constexpr int kProducts = 1;
  static constexpr int kSumSteps = 1;
  static constexpr bool kTwoLevels = false;
};

// float32 operands rounded to TF32 (10 explicit bits of mantissa).
struct TF32Math {
  using Element = float;
  using Operand = cutlass::tfloat32_t;
  using Atom = cute::SM80_16x8x8_F32TF32TF32F32_TN;
  static constexpr int kInstructionK = 8;
  static constexpr int kProducts = 1;
  static constexpr int kSumSteps = 1;
  static constexpr bool kTwoLevels = false;
};

// float32 accuracy: each operand is split into two TF32 numbers, and three of the four products are summed.
struct TripleTF32Math : TF32Math {
  static constexpr int kProducts = 3;
  static constexpr int kSumSteps = 2;
};

// The same with sums in two levels: their rounding errors do not grow with the length.
struct TwoLevelTripleTF32Math : TripleTF32Math {
  static constexpr bool kTwoLevels = true;
};

// Nearest TF32, ties away from zero; the matrix instruction alone would cut the mantissa and bias the result.
CUTE_DEVICE float round_to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}

}  // namespace block_sparse
