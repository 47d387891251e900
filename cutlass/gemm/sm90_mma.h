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

// An operand tile of 128-byte rows in the 128-byte swizzle, as the copy engine leaves it: K-major [MN, 64 of K], or
// MN-major [K, 64 of MN]. Groups of 8 rows are 1024 bytes apart; the tile is one swizzle atom wide.
CUTE_DEVICE uint64_t swizzled_operand(uint32_t shared_address) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  constexpr uint64_t kRowGroupStride = uint64_t(1024 >> 4) << 32;
  constexpr uint64_t kLeading = uint64_t(1) << 16;  // not used by such a tile
  return kSwizzle128 | kRowGroupStride | kLeading | ((shared_address & 0x3FFFF) >> 4);
}

// How far a descriptor moves for the next 16 of K, in its units of 16 bytes.
template <MajorMode kMajor>
constexpr uint64_t kInstructionStep = kMajor == MajorMode::K ? 32 / 16 : 16 * 128 / 16;

// accumulator [64, 256] += A [64, 16] B [16, 256]; A and B from shared memory, B K-major.
template <class Element, MajorMode kMajorA>
struct Mma64x256 {
  using Instruction = std::conditional_t<std::is_same_v<Element, cutlass::bfloat16_t>,
                                         cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<kMajorA, MajorMode::K>,
                                         cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<kMajorA, MajorMode::K>>;

  static CUTE_DEVICE void add_product(uint64_t a, uint64_t b, float (&accumulator)[128]) {
    issue(a, b, accumulator, std::make_integer_sequence<int, 128>{});
  }

 private:
  template <int... kIndex>
  static CUTE_DEVICE void issue(uint64_t a, uint64_t b, float (&accumulator)[128],
                                std::integer_sequence<int, kIndex...>) {
    Instruction::fma(a, b, accumulator[kIndex]...);
  }
};

}  // namespace block_sparse::sm90
