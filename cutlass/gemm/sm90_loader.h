// The loading warps: one for the tokens, one for the pieces of each of the group's lines.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/sm90_tile_scheduler.h"

namespace block_sparse::sm90 {

// What the multiplying warps are told of a stage.
struct StageControl {
  static constexpr int kLast = 1 << WideWork::kGroupLines;  // the tile's last item
  static constexpr int kTileShift = WideWork::kGroupLines + 1;
  static constexpr int kNoMoreTiles = -1;
  static_assert(kMostTiles <= INT32_MAX >> kTileShift);

  static CUTE_DEVICE int make(const WideWork::Item& item, bool last, int tile) {
    int control = last ? kLast | tile << kTileShift : 0;
    CUTE_UNROLL
    for (int line = 0; line < WideWork::kGroupLines; ++line) control |= (item.pieces[line] >= 0) << line;
    return control;
  }
};

// Run by one warp; `role` 0 loads tokens and writes the control word, role 1 + line loads that line's pieces. Every
// role waits and arrives on every stage, also where it has nothing to load: none can get a lap ahead of another.
template <class Config, class Shared>
CUTE_DEVICE void load_tiles(Shared& shared, const WideWork& work, const CUtensorMap* input_map,
                            const CUtensorMap* values_map, const TileRaster& raster, int pieces_per_row, int role,
                            int lane) {
  using Item = WideWork::Item;
  const uint32_t input_bytes = raster.tile_tokens * Config::kTokenBytes;
  constexpr uint64_t kNoHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
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
      if (base + 32 < count) next = fetch_item<WideWork>(items, listed, base + 32 + lane);
      // Where this lane's piece is in `values`, seen as a matrix of bw columns.
      const int piece = role == 0 ? -1 : mine.pieces[role - 1];
      const int piece_row = piece / pieces_per_row * kChunk;
      const int piece_column = piece % pieces_per_row * kChunk;
      for (int i = 0; i < min(32, count - base); ++i) {
        Item item{};
        int row = 0, column = 0, present = 0;
        if (role == 0) {
          item.chunk = __shfl_sync(~0u, mine.chunk, i);
          CUTE_UNROLL
          for (int line = 0; line < WideWork::kGroupLines; ++line) {
            item.pieces[line] = __shfl_sync(~0u, mine.pieces[line], i);
            present |= item.pieces[line] >= 0;
          }
        } else {
          row = __shfl_sync(~0u, piece_row, i);
          column = __shfl_sync(~0u, piece_column, i);
          present = __shfl_sync(~0u, piece, i) >= 0;
        }
        if (lane == 0) {
          const int stage = at.stage;
          shared.ring.wait_empty(at);
          uint64_t* full = shared.ring.full_address(at);
          if (role == 0) {
            store_shared(shared.control[stage], StageControl::make(item, base + i + 1 == count, tile));
            shared.ring.expect_bytes(at, present ? input_bytes : 0);
            if (present) {
              cute::SM90_TMA_LOAD_2D::copy(input_map, full, kNoHint, shared.input[stage], item.chunk * kChunk,
                                           first_token);
            }
          } else {
            shared.ring.expect_bytes(at, present ? Config::kPieceBytes : 0);
            if (present) {
              cute::SM90_TMA_LOAD_2D::copy(values_map, full, kNoHint, shared.pieces[stage][role - 1], column, row);
            }
          }
        }
        __syncwarp();
        at.advance(Config::kStages);
      }
    }
  }
  if (lane == 0) {
    shared.ring.wait_empty(at);
    if (role == 0) store_shared(shared.control[at.stage], StageControl::kNoMoreTiles);
    shared.ring.expect_bytes(at, 0);
  }
}

}  // namespace block_sparse::sm90
