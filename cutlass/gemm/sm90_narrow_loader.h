// The loading warps for pieces of 32 or 16: one for the tokens, one for the pieces of each half of the group.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/sm90_tile_scheduler.h"

namespace block_sparse::sm90 {

// What the multiplying warps are told of a stage.
struct NarrowControl {
  static constexpr int kNoMoreTiles = -1;

  uint32_t mask[2];  // of each half
  int tile;          // the tile that this stage ends, or kGoesOn, or kNoMoreTiles
  static constexpr int kGoesOn = -2;
};

// Run by one warp; `role` 0 loads tokens and writes the control words, role 1 + half loads that half's pieces. Every
// role waits and arrives on every stage, also where it has nothing to load: none can get a lap ahead of another.
template <class Config, class Shared>
CUTE_DEVICE void load_narrow_tiles(Shared& shared, const typename Config::Work& work, const CUtensorMap* input_map,
                                   const CUtensorMap* values_map, const TileRaster& raster, int pieces_per_row,
                                   int role, int lane) {
  using Work = typename Config::Work;
  using Item = typename Work::Item;
  constexpr uint64_t kNoHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const uint32_t input_bytes = raster.tile_tokens * Config::kTokenBytes;
  const bool second_half = role == 2;
  RingPosition at;
  for (int turn = 0;; ++turn) {
    shared.box_full.wait(turn & 1);
    keep_loads_below();
    const int tile = load_shared(shared.box.tile);
    const int first_token = raster.first_token(load_shared(shared.box.token_tile));
    const Item* items = work.items + load_shared(shared.box.first_item);
    const int listed = load_shared(shared.box.items);
    Item next = shared.box.head[lane];
    __syncwarp();
    if (tile < 0) break;
    if (lane == 0) shared.box_empty.arrive();

    const int count = max(listed, 1);
    for (int base = 0; base < count; base += 32) {
      const Item mine = next;
      if (base + 32 < count) next = fetch_item<Work>(items, listed, base + 32 + lane);
      // Where the pieces of this lane's item begin that this role loads, and how many there are.
      const int my_first = mine.first_piece + (second_half ? __popc(mine.mask[0]) : 0);
      const int my_count = role == 0 ? 0 : __popc(second_half ? mine.mask[1] : mine.mask[0]);
      const auto fetch_piece = [&](int i) {  // this lane's piece of item i, read one item ahead
        const int first = __shfl_sync(~0u, my_first, i);
        return lane < __shfl_sync(~0u, my_count, i) ? work.pieces[first + lane] : 0;
      };
      uint32_t next_piece = fetch_piece(0);
      const int batch = min(32, count - base);
      for (int i = 0; i < batch; ++i) {
        const uint32_t piece = next_piece;
        const int pieces = __shfl_sync(~0u, my_count, i);
        if (i + 1 < batch) next_piece = fetch_piece(i + 1);
        const int stage = at.stage;
        uint64_t* full = shared.ring.full_address(at);
        shared.ring.wait_empty(at);
        if (role == 0) {
          const int chunk = __shfl_sync(~0u, mine.chunk, i);
          const uint32_t mask0 = __shfl_sync(~0u, mine.mask[0], i);
          const uint32_t mask1 = __shfl_sync(~0u, mine.mask[1], i);
          if (lane == 0) {
            const bool present = mask0 | mask1;
            store_shared(shared.control[stage].mask[0], mask0);
            store_shared(shared.control[stage].mask[1], mask1);
            store_shared(shared.control[stage].tile, base + i + 1 == count ? tile : NarrowControl::kGoesOn);
            shared.ring.expect_bytes(at, present ? input_bytes : 0);
            if (present) {
              cute::SM90_TMA_LOAD_2D::copy(input_map, full, kNoHint, shared.input[stage], chunk * kChunk, first_token);
            }
          }
        } else {
          if (lane == 0) shared.ring.expect_bytes(at, pieces * Config::kPieceBytes);
          __syncwarp();
          if (lane < pieces) {
            const int number = piece & ((1u << Work::kPieceBits) - 1);
            const int bit = piece >> Work::kPieceBits;
            cute::SM90_TMA_LOAD_2D::copy(values_map, full, kNoHint, shared.pieces[stage][role - 1][bit],
                                         number % pieces_per_row * Work::kSide, number / pieces_per_row * Work::kSide);
          }
        }
        __syncwarp();
        at.advance(Config::kStages);
      }
    }
  }
  if (lane == 0) {
    shared.ring.wait_empty(at);
    if (role == 0) store_shared(shared.control[at.stage].tile, NarrowControl::kNoMoreTiles);
    shared.ring.expect_bytes(at, 0);
  }
}

}  // namespace block_sparse::sm90
