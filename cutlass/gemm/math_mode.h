// Arithmetic of a kernel: the element in memory, the operand of the matrix instruction, and how one becomes the other.
#pragma once

#include <cute/tensor.hpp>

namespace block_sparse {

struct BFloat16Math {
  using Element = cutlass::bfloat16_t;
  using Operand = cutlass::bfloat16_t;
  using Atom = cute::SM80_16x8x16_F32BF16BF16F32_TN;
  static constexpr int kInstructionK = 16;
  static constexpr int kProducts = 1;
};

struct Float16Math {
  using Element = cutlass::half_t;
  using Operand = cutlass::half_t;
  using Atom = cute::SM80_16x8x16_F32F16F16F32_TN;
  static constexpr int kInstructionK = 16;
  static constexpr int kProducts = 1;
};

// float32 operands rounded to TF32 (10 explicit bits of mantissa).
struct TF32Math {
  using Element = float;
  using Operand = cutlass::tfloat32_t;
  using Atom = cute::SM80_16x8x8_F32TF32TF32F32_TN;
  static constexpr int kInstructionK = 8;
  static constexpr int kProducts = 1;
};

// float32 accuracy: each operand is split into two TF32 numbers, and three of the four products are summed.
struct TripleTF32Math : TF32Math {
  static constexpr int kProducts = 3;
};

// Nearest TF32, ties away from zero; the matrix instruction alone would cut the mantissa and bias the result.
CUTE_DEVICE float round_to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}

}  // namespace block_sparse
