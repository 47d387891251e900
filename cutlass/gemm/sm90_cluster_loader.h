// The loading warps of the cluster kernel: one for the tokens, one for the pieces of each half of the thread block's
// lines. Every one of them waits and arrives on every stage, also where it has nothing to load: none can get a lap
// ahead of another.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/sm90_tile_scheduler.h"

namespace block_sparse::sm90 {

// What the multiplying warps are told of a stage.
struct ClusterControl {
  static constexpr int kGoesOn = -2;
  static constexpr int kNoMoreTiles = -1;

  int tile;           // the tile that this stage ends, or one of the above
  uint32_t parts[2];  // of each half: bit part: the half has a block at that part of the chunk
};

// The parts of a chunk at which a quarter has any block.
template <class Work>
CUTE_DEVICE uint32_t parts_of(uint32_t mask) {
  constexpr uint32_t kLines = (1u << Work::kQuarterLines) - 1;
  uint32_t parts = 0;
  CUTE_UNROLL
  for (int part = 0; part < Work::kParts; ++part) {
    parts |= uint32_t((mask >> (part * Work::kQuarterLines) & kLines) != 0) << part;
  }
  return parts;
}

// Run by one warp. Of a chunk that both thread blocks of the cluster need, each loads its half of the tokens for both.
template <class Config, class Shared>
CUTE_DEVICE void load_cluster_tokens(Shared& shared, const typename Config::Work& work, const CUtensorMap* input_map,
                                     int rank, int lane) {
  using Work = typename Config::Work;
  using Item = typename Work::Item;
  constexpr uint64_t kNoHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr uint16_t kEveryRank = (1 << Work::kRanks) - 1;
  constexpr int kBoxTokens = Config::kInputBoxTokens;
  RingPosition at;
  for (int turn = 0;; ++turn) {
    shared.box_full.wait(turn & 1);
    keep_loads_below();
    const int tile = load_shared(shared.box.tile);
    const int first_token = load_shared(shared.box.token_tile) * Config::kTokens;
    const Item* items = work.items + load_shared(shared.box.first_item);
    const int listed = load_shared(shared.box.items);
    Item next = shared.box.head[lane];
    __syncwarp();
    if (tile < 0) break;
    if (lane == 0) shared.box_empty.arrive();

    const int count = max(listed, 1);
    for (int base = 0; base < count; base += 32) {
      const int my_chunk = rank == 0 ? next.chunk[0] : next.chunk[1];
      const bool my_shared = next.chunk[0] == next.chunk[1];
      const uint32_t my_parts = parts_of<Work>(rank == 0 ? next.mask[0] : next.mask[2]) |
                                parts_of<Work>(rank == 0 ? next.mask[1] : next.mask[3]) << 16;
      if (base + 32 < count) next = fetch_item<Work>(items, listed, base + 32 + lane);
      for (int i = 0; i < min(32, count - base); ++i) {
        const int chunk = __shfl_sync(~0u, my_chunk, i);
        const bool both = __shfl_sync(~0u, my_shared, i);
        const uint32_t parts = __shfl_sync(~0u, my_parts, i);
        if (lane == 0) {
          shared.ring.wait_empty(at);
          ClusterControl& control = shared.control[at.stage];
          store_shared(control.tile, base + i + 1 == count ? tile : ClusterControl::kGoesOn);
          store_shared(control.parts[0], parts & 0xffff);
          store_shared(control.parts[1], parts >> 16);
          shared.ring.expect_bytes(at, parts ? Config::kInputBytes : 0);
          if (parts) {
            uint64_t* full = shared.ring.full_address(at);
            auto* box = shared.input[at.stage];
            const int column = chunk * kChunk;
            if (both) {
              cute::SM90_TMA_LOAD_MULTICAST_2D::copy(input_map, full, kEveryRank, kNoHint,
                                                     box + rank * kBoxTokens * kChunk, column,
                                                     first_token + rank * kBoxTokens);
            } else {
              CUTE_UNROLL
              for (int part = 0; part < Work::kRanks; ++part) {
                cute::SM90_TMA_LOAD_2D::copy(input_map, full, kNoHint, box + part * kBoxTokens * kChunk, column,
                                             first_token + part * kBoxTokens);
              }
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
    store_shared(shared.control[at.stage].tile, ClusterControl::kNoMoreTiles);
    shared.ring.expect_bytes(at, 0);
  }
  __syncwarp();
}

// Zeroes the places of absent pieces next to present ones: an instruction multiplies all lines of a part.
template <class Config>
class ZeroFill {
 public:
  // `places` of a stage get pieces, `absent` must be zero. By a whole warp, before it arrives on the stage.
  template <class Pieces>
  CUTE_DEVICE void run(Pieces& pieces, int stage, uint32_t places, uint32_t absent, int lane) {
    uint32_t zero = __shfl_sync(~0u, zero_, stage);
    uint32_t todo = absent & ~zero;
    if (todo) {
      for (; todo; todo &= todo - 1) {
        auto* piece = reinterpret_cast<uint4*>(pieces[__ffs(todo) - 1]);
        CUTE_UNROLL
        for (int i = lane; i < int(Config::kPieceBytes / sizeof(uint4)); i += 32) piece[i] = uint4{};
      }
      cutlass::arch::fence_view_async_shared();  // the matrix instructions read what we wrote
      __syncwarp();
    }
    zero = (zero | absent) & ~places;
    if (lane == stage) zero_ = zero;
  }

 private:
  uint32_t zero_ = 0;  // lane s: the places of stage s that hold zeros
};

// Run by one warp for each half; `quarter` = rank * kHalves + half.
template <class Config, class Shared>
CUTE_DEVICE void load_cluster_pieces(Shared& shared, const typename Config::Work& work, const CUtensorMap* values_map,
                                     int pieces_per_row, int quarter, int half, int lane) {
  using Work = typename Config::Work;
  using Item = typename Work::Item;
  constexpr uint64_t kNoHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr uint32_t kLines = (1u << Work::kQuarterLines) - 1;
  RingPosition at;
  ZeroFill<Config> zero_fill;
  for (int turn = 0;; ++turn) {
    shared.box_full.wait(turn & 1);
    keep_loads_below();
    const int tile = load_shared(shared.box.tile);
    const Item* items = work.items + load_shared(shared.box.first_item);
    const int listed = load_shared(shared.box.items);
    // A window of 32 pieces, one a lane, and the next 32. The last may reach into another group's, and are not used.
    int fetched = load_shared(shared.box.first_piece[half]) + lane;
    int window = load_shared(shared.box.head_pieces[half][lane]);
    Item next = shared.box.head[lane];
    __syncwarp();
    if (tile < 0) break;
    if (lane == 0) shared.box_empty.arrive();

    const auto fetch_pieces = [&] {
      fetched += 32;
      return work.pieces[min(fetched, work.piece_count - 1)];
    };
    int passed = 0;  // pieces of the window that are loaded
    int next_window = fetch_pieces();
    const int count = max(listed, 1);
    for (int base = 0; base < count; base += 32) {
      const uint32_t masks = quarter == 0 ? next.mask[0] : quarter == 1 ? next.mask[1] : next.mask[2 + quarter % 2];
      if (base + 32 < count) next = fetch_item<Work>(items, listed, base + 32 + lane);
      for (int i = 0; i < min(32, count - base); ++i) {
        const uint32_t mask = __shfl_sync(~0u, masks, i);
        uint32_t wanted = 0;  // all lines of the parts that have any
        CUTE_UNROLL
        for (int part = 0; part < Work::kParts; ++part) {
          const uint32_t lines = kLines << (part * Work::kQuarterLines);
          if (mask & lines) wanted |= lines;
        }
        auto& pieces = shared.pieces[at.stage][half];
        shared.ring.wait_empty(at);
        if constexpr (Work::kMaskBits > 1) zero_fill.run(pieces, at.stage, mask, wanted & ~mask, lane);
        if (lane == 0) shared.ring.expect_bytes(at, __popc(mask) * Config::kPieceBytes);
        __syncwarp();
        // Lane l loads into place l.
        const int mine = passed + __popc(mask & ((1u << lane) - 1));
        const int near = __shfl_sync(~0u, window, mine % 32);
        const int far = __shfl_sync(~0u, next_window, mine % 32);
        if (lane < Work::kMaskBits && mask >> lane & 1) {
          const int piece = mine < 32 ? near : far;
          cute::SM90_TMA_LOAD_2D::copy(values_map, shared.ring.full_address(at), kNoHint, pieces[lane],
                                       piece % pieces_per_row * Work::kSide, piece / pieces_per_row * Work::kSide);
        }
        passed += __popc(mask);
        if (passed >= 32) {
          passed -= 32;
          window = next_window;
          next_window = fetch_pieces();
        }
        at.advance(Config::kStages);
      }
    }
  }
  if (lane == 0) {
    shared.ring.wait_empty(at);
    shared.ring.expect_bytes(at, 0);
  }
  __syncwarp();
}

}  // namespace block_sparse::sm90
