// Hopper's warpgroup matrix instruction: shared-memory descriptors and the m64n256k16 instruction that the dense x
// sparse kernel issues.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/arch/mma_sm90_gmma.hpp>

#include <cstdint>
#include <type_traits>
#include <utility>

namespace block_sparse::sm90 {

using MajorMode = cute::SM90::GMMA::Major;

// How the 16-byte vectors of a row of kSide 16-bit elements are permuted in shared memory, by the copy engine's swizzle
// of that width: vector v lies at v ^ row_swizzle(row).
template <int kSide>
CUTE_HOST_DEVICE constexpr int row_swizzle(int row) {
  return kSide == 64 ? row % 8 : kSide == 32 ? row / 2 % 4 : row / 4 % 2;
}

// Descriptor of an operand tile as the copy engine leaves it: rows of kSide elements, swizzled over their width. Rows
// are M or N (K-major; any number of them), or K (MN-major; squares of kSide x kSide one after the other along M).
// The lower word says where the tile is, in units of 16 bytes, the upper one how it is laid out.
template <int kSide>
constexpr uint32_t operand_layout() {
  constexpr uint32_t kSwizzle = kSide == 64 ? 1 : kSide == 32 ? 2 : 3;
  constexpr uint32_t kRowGroupStride = 8 * kSide * 2 / 16;  // from 8 rows to the next 8
  return kSwizzle << 30 | kRowGroupStride;
}

template <MajorMode kMajor, int kSide>
CUTE_DEVICE uint32_t operand_place(uint32_t shared_address) {
  constexpr uint32_t kSquareStride = kSide * kSide * 2 / 16;
  return (kMajor == MajorMode::MN ? kSquareStride << 16 : 0) + shared_address / 16;
}

CUTE_DEVICE uint64_t operand(uint32_t layout, uint32_t place) { return uint64_t(layout) << 32 | place; }

// How far a tile's place moves for the next 16 of K.
template <MajorMode kMajor, int kSide>
constexpr uint32_t kInstructionStep = kMajor == MajorMode::K ? 32 / 16 : 16 * kSide * 2 / 16;

// accumulator [64, 256] += A [64, 16] B [16, 256], or = if `starts`; A and B from shared memory, B K-major.
template <class Element, MajorMode kMajorA>
struct Mma64x256 {
  using Instruction = std::conditional_t<std::is_same_v<Element, cutlass::bfloat16_t>,
                                         cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<kMajorA, MajorMode::K>,
                                         cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<kMajorA, MajorMode::K>>;

  static CUTE_DEVICE void add_product(uint64_t a, uint64_t b, float (&accumulator)[128], bool starts) {
    using cute::SM90::GMMA::ScaleOut;
    issue(a, b, accumulator, starts ? ScaleOut::Zero : ScaleOut::One, std::make_integer_sequence<int, 128>{});
  }

 private:
  template <int... kIndex>
  static CUTE_DEVICE void issue(uint64_t a, uint64_t b, float (&accumulator)[128], cute::SM90::GMMA::ScaleOut scale,
                                std::integer_sequence<int, kIndex...>) {
    Instruction::fma(a, b, accumulator[kIndex]..., scale);
  }
};

}  // namespace block_sparse::sm90
