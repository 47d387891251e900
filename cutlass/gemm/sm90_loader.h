// The loading warps: one for the tokens, one for the pieces of each half of the group. Every one of them waits and
// arrives on every stage, also where it has nothing to load: none can get a lap ahead of another.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/sm90_tile_scheduler.h"

namespace block_sparse::sm90 {

// What the multiplying warps are told of a stage: which TileOutput is that of the tile that it ends, and the parts
// (sm90_work.h) that it holds.
struct StageControl {
  static constexpr int kGoesOn = -2;  // in place of the output: the stage does not end its tile
  static constexpr int kNoMoreTiles = -1;

  uint64_t word;

  static CUTE_DEVICE uint64_t make(int output, uint32_t parts) { return uint64_t(uint32_t(output)) << 32 | parts; }
  static CUTE_DEVICE int output(uint64_t word) { return int(word >> 32); }
  static CUTE_DEVICE uint32_t half_parts(uint64_t word, int half) {
    return uint32_t(word) >> (half * kPartsHalfBits) & kHalfPartsMask;
  }
};

constexpr uint64_t kNoCacheHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);

// The tokens of each item, two chunks that follow one another as one box of `pair_map`; and what the multiplying warps
// have to know of it. A thread block of a cluster loads its share of the tokens, for all. Run by one warp.
template <class Config, class Shared>
CUTE_DEVICE void load_tokens(Shared& shared, const TaskParams<typename Config::Work>& params,
                             const CUtensorMap* input_map, const CUtensorMap* pair_map, int rank, int lane) {
  using Work = typename Config::Work;
  using Item = typename Work::Item;
  constexpr int kChunkElements = Config::kTokens * Work::kChunkInputs;
  const int tile_tokens = params.raster.tile_tokens;
  const int share = rank * Config::share_step(tile_tokens);  // where ours begins
  const uint32_t chunk_bytes = Config::kCluster * Config::share_tokens(tile_tokens) * Work::kChunkInputs *
                               sizeof(typename Config::Element);  // of all shares
  const auto load_share = [&](const CUtensorMap* map, uint64_t* full, auto* tokens, int row_elements, int column,
                              int first_token) {
    if constexpr (Config::kCluster == 1) {
      cute::SM90_TMA_LOAD_2D::copy(map, full, kNoCacheHint, tokens, column, first_token);
    } else {
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(map, full, (1 << Config::kCluster) - 1, kNoCacheHint,
                                             tokens + share * row_elements, column, first_token + share);
    }
  };
  RingPosition at;
  for (int turn = 0;; ++turn) {
    int first_token;
    const auto tile =
        take_tile(shared, params.work, turn, lane, [&] { first_token = load_shared(shared.box.first_token); });
    if (tile.output < 0) break;
    if (lane == 0) shared.box_empty.arrive();

    Item next = tile.head;
    const int count = tile.count();
    for (int base = 0; base < count; base += 32) {
      const Item mine = next;
      const uint32_t my_parts = mine.parts(rank);
      if (base + 32 < count) next = fetch_item<Work>(tile.items, tile.listed, base + 32 + lane);
      for (int i = 0; i < min(32, count - base); ++i) {
        const uint32_t parts = __shfl_sync(~0u, my_parts, i);
        int chunk[Work::kChunks];
        CUTE_UNROLL
        for (int c = 0; c < Work::kChunks; ++c) chunk[c] = __shfl_sync(~0u, mine.chunk[c], i);
        if (lane == 0) {
          shared.ring.wait_empty(at);
          const int ended = base + i + 1 == count ? tile.output : StageControl::kGoesOn;
          store_shared(shared.control[at.stage].word, StageControl::make(ended, parts));
          shared.ring.expect_bytes(at, __popc(parts >> kPartsChunkBit) * chunk_bytes);
          if (Work::kChunks == 2 && parts & kPartsAdjacent) {
            load_share(pair_map, shared.ring.full_address(at), shared.input[at.stage], kItemInputs,
                       chunk[0] * Work::kChunkInputs, first_token);
          } else {
            CUTE_UNROLL
            for (int c = 0; c < Work::kChunks; ++c) {
              if (!(parts >> (kPartsChunkBit + c) & 1)) continue;
              load_share(input_map, shared.ring.full_address(at), shared.input[at.stage] + c * kChunkElements,
                         Work::kChunkInputs, chunk[c] * Work::kChunkInputs, first_token);
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
    store_shared(shared.control[at.stage].word, StageControl::make(StageControl::kNoMoreTiles, 0));
    shared.ring.expect_bytes(at, 0);
  }
}

// The pieces of one half, a line, where they are 64 x 64: a box each. Run by one warp.
template <class Config, class Shared>
CUTE_DEVICE void load_pieces(Shared& shared, const TaskParams<WideWork>& params, const CUtensorMap* values_map,
                             int half, int, int lane) {
  using Item = WideWork::Item;
  RingPosition at;
  for (int turn = 0;; ++turn) {
    const auto tile = take_tile(shared, params.work, turn, lane, [] {});
    if (tile.output < 0) break;
    if (lane == 0) shared.box_empty.arrive();

    Item next = tile.head;
    const int count = tile.count();
    for (int base = 0; base < count; base += 32) {
      const int piece = next.pieces[half];
      const int piece_row = piece / params.pieces_per_row * WideWork::kSide;
      const int piece_column = piece % params.pieces_per_row * WideWork::kSide;
      if (base + 32 < count) next = fetch_item<WideWork>(tile.items, tile.listed, base + 32 + lane);
      for (int i = 0; i < min(32, count - base); ++i) {
        const int row = __shfl_sync(~0u, piece_row, i);
        const int column = __shfl_sync(~0u, piece_column, i);
        const bool present = __shfl_sync(~0u, piece, i) >= 0;
        if (lane == 0) {
          shared.ring.wait_empty(at);
          shared.ring.expect_bytes(at, present ? Config::kPieceBytes : 0);
          if (present) {
            cute::SM90_TMA_LOAD_2D::copy(values_map, shared.ring.full_address(at), kNoCacheHint,
                                         shared.pieces[at.stage][half], column, row);
          }
        }
        __syncwarp();
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
