// Which tile a persistent thread block computes next.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

#include "gemm/epilogue_function.h"
#include "gemm/sm90_ring.h"
#include "gemm/sm90_work.h"

namespace block_sparse::sm90 {

constexpr int64_t kMostTiles = (int64_t(1) << 28) - 1;  // of a launch

// Tiles in the order in which they are started: strips of a few token tiles; within a strip groups outer, token tiles
// inner, so that thread blocks which run together read the same pieces and few tokens.
struct TileRaster {
  int token_tiles;
  int groups;
  int strip;  // token tiles of a strip

  struct Place {
    int token_tile;
    int group;  // index into the work's groups
  };

  CUTE_HOST_DEVICE int size() const { return token_tiles * groups; }

  CUTE_DEVICE Place operator()(int tile) const {
    const int strip_tiles = strip * groups;
    const int first = tile / strip_tiles * strip;
    const int rest = tile % strip_tiles;
    const int width = min(strip, token_tiles - first);
    // The last strip runs longest first, for balance. The others do not, lest all thread blocks load at one time and
    // store at another.
    const bool last = first + strip >= token_tiles;
    return {first + rest % width, rest / width + (last ? groups : 0)};
  }
};

// What a dense x sparse kernel is given besides its tensor maps.
template <class Work>
struct TaskParams {
  TileRaster raster;
  Work work;
  int* counter;        // zero at the launch
  int pieces_per_row;  // of `values` as a matrix [nnz * bh, bw]
  int features;        // O (forward) or I
  const void* bias;    // [features] or null
  EpilogueActivation activation;
};

// The next tile, as the scheduling warp leaves it for the loading warps; 32 items of it come along, because reading
// them is what a loading warp would wait for.
template <class Work>
struct TileBox {
  int tile;  // -1: no more
  int token_tile;
  int first_item;
  int items;
  typename Work::Item head[32];
};

// With the pieces of each of the thread block's halves.
template <int kSide>
struct TileBox<ClusterWork<kSide>> {
  int tile;  // -1: no more
  int token_tile;
  int first_item;
  int items;
  int first_piece[2];
  typename ClusterWork<kSide>::Item head[32];
  int32_t head_pieces[2][32];
};

template <class Work>
CUTE_DEVICE typename Work::Item fetch_item(const typename Work::Item* items, int count, int i) {
  return i < count ? items[i] : Work::empty_item();
}

// How the first thread block of a cluster tells the second which tile is next.
template <int kSlots_>
struct TileRelay {
  static constexpr int kSlots = kSlots_;  // more than the tiles by which the first can be ahead
  FullBarrier full[kSlots];
  int tile[kSlots];

  CUTE_DEVICE void initialize() {
    for (FullBarrier& barrier : full) barrier.init(1);
  }

  // By one thread of rank 0, and of rank 1, in turn 0, 1, ...
  CUTE_DEVICE void send(int turn, int next) {
    const uint32_t target = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&tile[turn % kSlots]), 1);
    const uint32_t barrier = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&full[turn % kSlots]), 1);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(target), "r"(next),
                 "r"(barrier)
                 : "memory");
  }
  CUTE_DEVICE int receive(int turn) {
    FullBarrier& barrier = full[turn % kSlots];
    barrier.arrive_and_expect_tx(sizeof(int));
    barrier.wait(turn / kSlots & 1);
    return load_shared(tile[turn % kSlots]);
  }
};

// Run by one warp. `fill(tile)` writes what the box holds of a tile, or that there is none. `claim(turn)`, called by
// lane 0: the next tile, any number past the last if there is none.
template <class Shared, class Fill, class Claim>
CUTE_DEVICE void offer_tiles(Shared& shared, int first_tile, int tiles, int lane, Fill fill, Claim claim) {
  int tile = first_tile;
  for (int turn = 0;; ++turn) {
    const bool more = tile < tiles;
    fill(tile, more);
    __syncwarp();
    if (lane == 0) shared.box_full.arrive();
    if (!more) break;
    // Only when the loading warps have taken this tile: a tile claimed early is one that an idle thread block lacks.
    if (lane == 0) {
      shared.box_empty.wait(turn & 1);
      tile = claim(turn);
    }
    __syncwarp();  // no lane writes into the box before lane 0 saw it empty
    tile = __shfl_sync(~0u, tile, 0);
  }
}

template <class Work, class Box>
CUTE_DEVICE typename Work::Group fill_box(Box& box, const TileRaster& raster, const Work& work, int tile, bool more,
                                          int lane) {
  typename Work::Item item{};
  typename Work::Group group{};
  TileRaster::Place place{};
  if (more) {
    place = raster(tile);
    group = work.groups[place.group];
    item = fetch_item<Work>(work.items + group.first_item, group.items, lane);
  }
  box.head[lane] = item;
  if (lane == 0) {
    box.tile = more ? tile : -1;
    box.token_tile = place.token_tile;
    box.first_item = group.first_item;
    box.items = group.items;
  }
  return group;
}

// Tiles after a thread block's first come from a counter of this launch, zero at its start.
template <class Work, class Shared>
CUTE_DEVICE void schedule_tiles(Shared& shared, const TileRaster& raster, const Work& work, int* counter, int lane) {
  offer_tiles(
      shared, blockIdx.x, raster.size(), lane,
      [&](int tile, bool more) { fill_box(shared.box, raster, work, tile, more, lane); },
      [&](int) { return int(gridDim.x) + atomicAdd(counter, 1); });
}

// The same for clusters: rank 0 claims.
template <class Work, class Shared>
CUTE_DEVICE void schedule_cluster_tiles(Shared& shared, const TileRaster& raster, const Work& work, int* counter,
                                        int rank, int lane) {
  const int clusters = gridDim.x / Work::kRanks;
  const auto fill = [&](int tile, bool more) {
    const auto group = fill_box(shared.box, raster, work, tile, more, lane);
    if (!more) return;
    CUTE_UNROLL
    for (int half = 0; half < Work::kHalves; ++half) {
      const int first = rank == 0 ? group.first_piece[half] : group.first_piece[Work::kHalves + half];
      if (lane == 0) shared.box.first_piece[half] = first;
      shared.box.head_pieces[half][lane] = work.pieces[min(first + lane, work.piece_count - 1)];
    }
  };
  offer_tiles(shared, blockIdx.x / Work::kRanks, raster.size(), lane, fill, [&](int turn) {
    if (rank == 1) return shared.relay.receive(turn);
    const int tile = clusters + atomicAdd(counter, 1);
    shared.relay.send(turn, tile);
    return tile;
  });
}

}  // namespace block_sparse::sm90
