// The computing warpgroups of the Hopper weight gradient: WGMMA over the stages of one tile.
//
// Both operands are MN-major in shared memory, as TMA left them: the distance between strips is the descriptor's
// leading offset, so N is a list of unrelated strips and no multiplication is spent on features that no block needs.
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <utility>

#include "gemm/sm90_back_schedule.h"
#include "gemm/sm90_ring.h"

namespace block_sparse {

// One WGMMA of 64 x (64 kQuads) x 16.
template <class Element, int kQuads>
using BackMma = decltype(cute::SM90::GMMA::ss_op_selector<Element, Element, float,
                                                          cute::Shape<cute::_64, cute::Int<64 * kQuads>, cute::_16>,
                                                          cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::MN>());

template <class Element, int kQuads, int kFirst, int kSize, int... kIndex>
CUTE_DEVICE void back_multiply(uint64_t a, uint64_t b, float (&accumulator)[kSize],
                               std::integer_sequence<int, kIndex...>) {
  BackMma<Element, kQuads>::fma(a, b, accumulator[kFirst + kIndex]...);
}

// Shared-memory descriptors, in units of 16 bytes, of a warpgroup's operands. Their low word: the address and the
// distance of strips, which are `strip_bytes` long. A word, because sums of words need half the registers.
CUTE_DEVICE uint32_t back_operand_place(uint32_t shared_address, int strip_bytes) {
  return uint32_t(strip_bytes >> 4) << 16 | (shared_address & 0x3FFFF) >> 4;
}

template <int kPiece>
CUTE_DEVICE uint64_t back_operand(uint32_t place) {
  constexpr uint64_t kSwizzle = kPiece == 64 ? 1 : 2;      // 128 or 64 bytes: a strip's row
  constexpr uint64_t kStrideOffset = 8 * kPiece * 2 / 16;  // eight tokens
  return kSwizzle << 62 | kStrideOffset << 32 | place;
}

// Adds `steps` stages of kTokens tokens into the accumulator. A stage is released once the WGMMAs of the stage after it
// are under way.
template <class Config, int kQuads, int kTokens>
CUTE_DEVICE void back_mainloop(float (&accumulator)[32 * kQuads], typename Config::Barriers& barriers, RingPosition& at,
                               const BackStages& stages, uint32_t a, uint32_t b, int steps) {
  using Element = typename Config::Element;
  // One WGMMA takes at most 256 of the N side; 320 and 384 go as two.
  constexpr int kQuads0 = kQuads <= 4 ? kQuads : 3, kQuads1 = kQuads - kQuads0;
  constexpr uint32_t kSecond = kQuads0 * (64 / Config::kPiece) * (kTokens * Config::kPiece * 2 >> 4);
  const auto operand = [](uint32_t place) { return back_operand<Config::kPiece>(place); };
  const bool releases = threadIdx.x % 32 == 0;
  int previous = 0;
  CUTE_UNROLL
  for (int i = 0; i < 32 * kQuads; ++i) accumulator[i] = 0.f;
#pragma unroll 4  // so that the next stage's descriptors are under way while the tensor cores work
  for (int step = 0; step < steps; ++step) {
    barriers.wait_full(at);
    const uint32_t stage_offset = at.stage * (stages.bytes >> 4);
    cute::warpgroup_arrive();
    CUTE_UNROLL
    for (int k = 0; k < kTokens / 16; ++k) {
      const uint32_t offset = stage_offset + k * (2 * Config::kPiece);
      back_multiply<Element, kQuads0, 0>(operand(a + offset), operand(b + offset), accumulator,
                                         std::make_integer_sequence<int, 32 * kQuads0>{});
      if constexpr (kQuads1 > 0) {
        back_multiply<Element, kQuads1, 32 * kQuads0>(operand(a + offset), operand(b + offset + kSecond), accumulator,
                                                      std::make_integer_sequence<int, 32 * kQuads1>{});
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    if (step > 0 && releases) barriers.release(previous);
    previous = at.stage;
    at.advance(stages.count);
  }
  cute::warpgroup_wait<0>();
  if (releases) barriers.release(previous);
}

// A warpgroup without work in the tile only releases the stages.
template <class Config>
CUTE_DEVICE void back_skip(typename Config::Barriers& barriers, RingPosition& at, const BackStages& stages, int steps) {
  const bool releases = threadIdx.x % 32 == 0;
  for (int step = 0; step < steps; ++step, at.advance(stages.count)) {
    barriers.wait_full(at);
    if (releases) barriers.release(at.stage);
  }
}

}  // namespace block_sparse
