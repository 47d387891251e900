// The pieces of 32 of one half where two thread blocks share the tokens: boxes of the copy engine, which has the time
// for them there, and its copies of zeros, because an instruction multiplies all lines of a part.
#pragma once

#include "gemm/sm90_piece_window.h"

namespace block_sparse::sm90 {

// What a place without a block is filled with. Read from memory: a box out of range takes the copy engine longer.
template <int kBytes>
__device__ const uint4 kZeros[kBytes / sizeof(uint4)] = {};

// Run by one warp; one lane has each of the half's places for a piece.
template <class Config, class Shared, int kSide>
CUTE_DEVICE void load_pieces(Shared& shared, const TaskParams<NarrowWork<kSide, 2>>& params,
                             const CUtensorMap* values_map, int half, int rank, int lane) {
  using Work = NarrowWork<kSide, 2>;
  using Item = typename Work::Item;
  const int place = lane;
  const bool is_place = place < Work::kHalfPieces;
  const uint32_t before = is_place ? (1u << place) - 1 : 0;
  const uint32_t part = is_place ? Work::kPartLines << (place / Work::kHalfLines * Work::kHalfLines) : 0;
  uint32_t zeros = 0;  // bit s: this lane's place of stage s holds zeros
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
      const uint32_t my_mask = next.half_mask(rank * kHalves + half);
      if (base + 32 < count) next = fetch_item<Work>(tile.items, tile.listed, base + 32 + lane);
      for (int i = 0; i < min(32, count - base); ++i) {
        const uint32_t mask = __shfl_sync(~0u, my_mask, i);
        const int offset = window.offset(mask, before);
        int row = offset, column = 0;
        if (params.pieces_per_row > 1) {  // seldom: most blocks are one piece wide, and a division is slow
          row = offset / params.pieces_per_row;
          column = offset % params.pieces_per_row * kSide;
        }
        const uint32_t stage_bit = 1u << at.stage;
        const bool present = is_place && mask >> place & 1;
        const bool blank = !present && mask & part && !(zeros & stage_bit);
        zeros = present ? zeros & ~stage_bit : blank ? zeros | stage_bit : zeros;
        const int written = __popc(__ballot_sync(~0u, present || blank));
        shared.ring.wait_empty(at);
        if (lane == 0) shared.ring.expect_bytes(at, written * Config::kPieceBytes);
        __syncwarp();
        auto* target = shared.pieces[at.stage][half] + place * kSide * kSide;
        if (present) {
          cute::SM90_TMA_LOAD_2D::copy(values_map, shared.ring.full_address(at), kNoCacheHint, target, column, row);
        } else if (blank) {
          cute::SM90_BULK_COPY_G2S::copy(kZeros<Config::kPieceBytes>, shared.ring.full_address(at), target,
                                         Config::kPieceBytes);
        }
        __syncwarp();
        window.pass(mask);
        at.advance(Config::kStages);
      }
    }
  }
  if (lane == 0) {
    shared.ring.wait_empty(at);
    shared.ring.expect_bytes(at, 0);
  }
}

}  // namespace block_sparse::sm90
