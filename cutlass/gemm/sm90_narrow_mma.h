// The warpgroup matrix instructions m64n32k16 and m64n16k16 with tokens as M from registers and a piece of W as N from
// shared memory: absent pieces cost nothing, however narrow the blocks are.
#pragma once

#include "gemm/sm90_mma.h"

namespace block_sparse::sm90 {

// A piece, kSide x kSide elements as the copy engine leaves it: K-major (forward) or MN-major, rows of kSide elements,
// swizzled over as many bytes. Groups of 8 rows follow each other.
template <int kSide>
CUTE_DEVICE uint64_t piece_operand(uint32_t shared_address) {
  constexpr int kRowBytes = 2 * kSide;
  constexpr uint64_t kSwizzle = uint64_t(kRowBytes == 64 ? 2 : 3) << 62;
  constexpr uint64_t kRowGroupStride = uint64_t(8 * kRowBytes >> 4) << 32;
  constexpr uint64_t kLeading = uint64_t(1) << 16;  // not used: a piece is one swizzle atom wide
  return kSwizzle | kRowGroupStride | kLeading | ((shared_address & 0x3FFFF) >> 4);
}

// accumulator [64, kSide] += A [64, 16] from registers x B [16, kSide].
template <class Element, int kSide, MajorMode kMajorB>
struct NarrowMma {
  static constexpr MajorMode K = MajorMode::K;
  template <class BFloat16, class Float16>
  using Pick = std::conditional_t<std::is_same_v<Element, cutlass::bfloat16_t>, BFloat16, Float16>;
  using Instruction = std::conditional_t<kSide == 32,
                                         Pick<cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_RS<K, kMajorB>,
                                              cute::SM90::GMMA::MMA_64x32x16_F32F16F16_RS<K, kMajorB>>,
                                         Pick<cute::SM90::GMMA::MMA_64x16x16_F32BF16BF16_RS<K, kMajorB>,
                                              cute::SM90::GMMA::MMA_64x16x16_F32F16F16_RS<K, kMajorB>>>;
  // How far a piece's descriptor moves for the next 16 of K, in its units of 16 bytes.
  static constexpr uint64_t kStep = kMajorB == K ? 32 / 16 : 16 * 2 * kSide / 16;

  static CUTE_DEVICE void add_product(const uint32_t (&a)[4], uint64_t b, float (&accumulator)[kSide / 2]) {
    issue(a, b, accumulator, std::make_integer_sequence<int, kSide / 2>{});
  }

 private:
  template <int... kIndex>
  static CUTE_DEVICE void issue(const uint32_t (&a)[4], uint64_t b, float (&accumulator)[kSide / 2],
                                std::integer_sequence<int, kIndex...>) {
    Instruction::fma(a[0], a[1], a[2], a[3], b, accumulator[kIndex]...);
  }
};

}  // namespace block_sparse::sm90
