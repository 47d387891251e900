// The pieces of 32 or 16 of one half: ordinary asynchronous copies, since the copy engine would take as long for such a
// box as for one of twice its width, and zeros, because an instruction multiplies all lines of a part.
#pragma once

#include "gemm/sm90_mma.h"
#include "gemm/sm90_piece_window.h"

namespace block_sparse::sm90 {

// 16 bytes from global to shared memory; zeros if `present` is false.
CUTE_DEVICE void copy_async_or_zero(uint32_t shared_address, const void* source, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(source), "r"(present ? 16 : 0)
               : "memory");
}

// Run by one warp. A few lanes copy each of the half's places for a piece.
template <class Config, class Shared, int kSide>
CUTE_DEVICE void load_pieces(Shared& shared, const TaskParams<NarrowWork<kSide>>& params, const CUtensorMap*, int half,
                             int, int lane) {
  using Element = typename Config::Element;
  using Work = NarrowWork<kSide>;
  using Item = typename Work::Item;
  constexpr int kPlaceLanes = 32 / Work::kHalfPieces;
  constexpr int kRowVectors = kSide * sizeof(Element) / 16;
  constexpr int kCopies = kSide * kRowVectors / kPlaceLanes;  // of a lane
  constexpr int kCopyRows = kPlaceLanes / kRowVectors;        // rows of a piece that its lanes copy at a time
  const int place = lane / kPlaceLanes;
  const int row = lane % kPlaceLanes / kRowVectors;
  const int vector = lane % kRowVectors;
  const uint32_t before = (1u << place) - 1;                                                // places before this one
  const uint32_t part = Work::kPartLines << (place / Work::kHalfLines * Work::kHalfLines);  // all of this one's part
  // Where this lane's first vector goes in stage 0, before the swizzle.
  const uint32_t target = cute::cast_smem_ptr_to_uint(shared.pieces[0][half]) + place * Config::kPieceBytes +
                          row * kSide * sizeof(Element) + vector * 16;
  const auto* source = static_cast<const Element*>(params.values) + row * int64_t(params.row_elements) + vector * 8;
  const int64_t copy_step = kCopyRows * int64_t(params.row_elements);
  uint32_t zeros = 0;  // bit s: what this lane copies of stage s is zero
  RingPosition at;
  for (int turn = 0;; ++turn) {
    PieceWindow window;
    const auto tile =
        take_tile(shared, params.work, turn, lane, [&] { window.take(shared, params.work.pieces, half, lane); });
    if (tile.output < 0) break;
    if (lane == 0) shared.box_empty.arrive();

    Item next = tile.head;
    window.begin();
    const int count = tile.count();
    for (int base = 0; base < count; base += 32) {
      const uint32_t my_mask = next.half_mask(half);
      if (base + 32 < count) next = fetch_item<Work>(tile.items, tile.listed, base + 32 + lane);
      for (int i = 0; i < min(32, count - base); ++i) {
        const uint32_t mask = __shfl_sync(~0u, my_mask, i);
        const int offset = window.offset(mask, before);
        const bool present = mask >> place & 1;
        const uint32_t stage_bit = 1u << at.stage;
        shared.ring.wait_empty(at);
        if (present || (mask & part && !(zeros & stage_bit))) {
          zeros = present ? zeros & ~stage_bit : zeros | stage_bit;
          const Element* from = source + (present ? int64_t(offset) * kSide : 0);
          const uint32_t to = target + at.stage * uint32_t(sizeof(shared.pieces[0]));
          CUTE_UNROLL
          for (int copy = 0; copy < kCopies; ++copy) {
            const int rows = copy * kCopyRows;  // those before; `row`, below kCopyRows, leaves the swizzle as it is
            copy_async_or_zero((to ^ row_swizzle<kSide>(rows) * 16) + rows * kSide * sizeof(Element), from, present);
            from += copy_step;
          }
        }
        cutlass::arch::cpasync_barrier_arrive_noinc(shared.ring.full_address(at));
        window.pass(mask);
        at.advance(Config::kStages);
      }
    }
  }
  shared.ring.wait_empty(at);
  shared.ring.full[at.stage].arrive();
}

}  // namespace block_sparse::sm90
