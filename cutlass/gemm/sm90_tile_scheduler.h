// Which tile a persistent thread block computes next.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

#include "gemm/epilogue_function.h"
#include "gemm/sm90_ring.h"
#include "gemm/sm90_tile_counter.h"
#include "gemm/sm90_work.h"

namespace block_sparse::sm90 {

// Tiles in the order in which they are started: strips of a few token tiles; within a strip groups outer, token tiles
// inner, so that thread blocks which run together read the same pieces and few tokens.
struct TileRaster {
  int token_tiles;
  int groups;
  int strip;        // token tiles of a strip
  int last_strip;   // and of the last one
  int tokens;       // T
  int tile_tokens;  // of a token tile, at most T

  struct Place {
    int token_tile;
    int group;  // index into the work's groups
  };

  CUTE_HOST_DEVICE int size() const { return token_tiles * groups; }

  // The last token tile ends with the tokens, and stores some of the rows before it once more, to the same bits: a row
  // out of range takes the copy engine longer than one in range.
  CUTE_DEVICE int first_token(int token_tile) const { return min(token_tile * tile_tokens, tokens - tile_tokens); }

  CUTE_DEVICE Place operator()(int tile) const {
    const int before = token_tiles - last_strip;  // token tiles before the last strip
    const int rest = tile - before * groups;
    // The last strip runs longest first, for balance. The others do not, lest all thread blocks load at one time and
    // store at another.
    if (rest >= 0) return {before + rest % last_strip, groups + rest / last_strip};
    const int strip_tiles = strip * groups;
    const int first = tile / strip_tiles * strip;
    const int width = min(strip, before - first);
    return {first + tile % strip_tiles % width, tile % strip_tiles / width};
  }
};

// What a dense x sparse kernel is given besides its tensor maps.
template <class Work>
struct TaskParams {
  TileRaster raster;
  Work work;
  TileCounter counter;
  const void* values;  // a matrix [nnz * bh, bw]
  int row_elements;    // bw
  int pieces_per_row;  // of `values`
  int features;        // O (forward) or I
  const void* bias;    // [features] or null
  EpilogueActivation activation;
};

// What of a tile's list of pieces comes along with the tile; nothing where items name their pieces.
template <class Work>
struct TilePieces {
  CUTE_DEVICE void fetch(const Work&, const typename Work::Group&, int, int) {}
};

template <int kSide, int kCluster>
struct TilePieces<NarrowWork<kSide, kCluster>> {
  using Work = NarrowWork<kSide, kCluster>;
  int first_piece[kHalves];
  int head[kHalves][32];

  CUTE_DEVICE void fetch(const Work& work, const typename Work::Group& group, int rank, int lane) {
    CUTE_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      // The group is in registers: the indices must be constants.
      const int first = rank == 0 ? group.first_piece[half] : group.first_piece[(kCluster - 1) * kHalves + half];
      if (lane == 0) first_piece[half] = first;
      head[half][lane] = work.pieces[first + lane];
    }
  }
};

// The next tile, as the scheduling warp leaves it for the loading warps; 32 items of it come along, because reading
// them is what a loading warp would wait for.
template <class Work>
struct TileBox {
  int output;  // which TileOutput; -1: no more tiles
  int first_token;
  int first_item;
  int items;
  typename Work::Item head[32];
  TilePieces<Work> pieces;
};

// What the multiplying warps need of a tile when they have done it: reading that then is what they would wait for.
template <class Element, class Work>
struct TileOutput {
  int first_token;
  int first_feature[Work::kBlockLines];
  Element bias[kGroupOutputs];  // if any

  // By a whole warp.
  CUTE_DEVICE void fetch(const TaskParams<Work>& params, const TileRaster::Place& place, int rank, int lane) {
    static_assert(Work::kBlockLines <= 32);
    const int* features = params.work.groups[place.group].first_feature + rank * Work::kBlockLines;
    const int feature = lane < Work::kBlockLines ? features[lane] : 0;
    if (lane < Work::kBlockLines) first_feature[lane] = feature;
    if (lane == 0) first_token = params.raster.first_token(place.token_tile);
    if (params.bias == nullptr) return;
    CUTE_UNROLL
    for (int output = lane; output < kGroupOutputs; output += 32) {
      const int wanted = __shfl_sync(~0u, feature, output / Work::kSide) + output % Work::kSide;
      bias[output] = wanted < params.features ? static_cast<const Element*>(params.bias)[wanted] : Element(0.0f);
    }
  }
};

template <class Work>
CUTE_DEVICE typename Work::Item fetch_item(const typename Work::Item* items, int count, int i) {
  return i < count ? items[i] : Work::empty_item();
}

// A tile as a loading warp takes it from the box.
template <class Work>
struct TakenTile {
  using Item = typename Work::Item;

  int output;  // -1: there was none
  const Item* items;
  int listed;
  Item head;  // this lane's of the first 32

  CUTE_DEVICE int count() const { return max(listed, 1); }
};

// Run by a whole loading warp for its tile number `turn`. `read_more()` reads what else it wants of the box; if there
// was a tile, one lane then arrives on `box_empty`.
template <class Work, class Shared, class ReadMore>
CUTE_DEVICE TakenTile<Work> take_tile(Shared& shared, const Work& work, int turn, int lane, ReadMore read_more) {
  shared.box_full.wait(turn & 1);
  keep_loads_below();
  TakenTile<Work> tile;
  tile.output = load_shared(shared.box.output);
  tile.items = work.items + load_shared(shared.box.first_item);
  tile.listed = load_shared(shared.box.items);
  read_more();
  tile.head = shared.box.head[lane];
  __syncwarp();
  return tile;
}

// In a cluster, the tiles that the first thread block takes, on their way to the second one's shared memory: a slot
// each, in turn. The first sends its turn's next tile once its loading warps have begun tile number `turn`. The second
// has let go of all stages before that tile but the last kStages, so it has read what was sent kStages + 2 turns ago: a
// tile is one stage at least.
template <int kStages>
struct TileRelay {
  static constexpr int kSlots = kStages + 2;
  FullBarrier arrived[kSlots];
  int tile[kSlots];

  // By one thread, before a barrier of the cluster.
  CUTE_DEVICE void initialize() {
    for (FullBarrier& barrier : arrived) barrier.init(1);
  }

  CUTE_DEVICE void send(int turn, int next) {
    const int slot = turn % kSlots;
    cute::store_shared_remote(next, cute::cast_smem_ptr_to_uint(&tile[slot]),
                              cute::cast_smem_ptr_to_uint(&arrived[slot]), 1);
  }

  CUTE_DEVICE int receive(int turn) {
    const int slot = turn % kSlots;
    arrived[slot].arrive_and_expect_tx(sizeof(int));
    arrived[slot].wait(turn / kSlots & 1);
    return load_shared(tile[slot]);
  }
};

// In place of it where thread blocks work alone.
struct NoRelay {
  CUTE_DEVICE void initialize() {}
  CUTE_DEVICE void send(int, int) {}
  CUTE_DEVICE int receive(int) { return 0; }
};

// Run by one warp of each thread block.
template <class Config, class Shared>
CUTE_DEVICE void schedule_tiles(Shared& shared, const TaskParams<typename Config::Work>& params, int rank, int lane) {
  using Work = typename Config::Work;
  const Work& work = params.work;
  const int tiles = params.raster.size();
  const int takers = gridDim.x / Config::kCluster;
  int tile = blockIdx.x / Config::kCluster;
  int output = 0;
  for (int turn = 0;; ++turn) {
    const bool more = tile < tiles;
    typename Work::Item item{};
    typename Work::Group group{};
    if (more) {
      const auto place = params.raster(tile);
      group = work.groups[place.group];
      item = fetch_item<Work>(work.items + group.first_item, group.items, lane);
      shared.outputs[output].fetch(params, place, rank, lane);
      if (lane == 0) shared.box.first_token = params.raster.first_token(place.token_tile);
    }
    shared.box.head[lane] = item;
    shared.box.pieces.fetch(work, group, rank, lane);
    if (lane == 0) {
      shared.box.output = more ? output : -1;
      shared.box.first_item = group.first_item;
      shared.box.items = group.items;
    }
    __syncwarp();
    if (lane == 0) shared.box_full.arrive();
    if (!more) break;
    output = output + 1 == Config::kTileOutputs ? 0 : output + 1;
    if (lane == 0) {
      if (turn == 0 && rank == 0) params.counter.open(tiles);  // while the first tile is loaded
      // Only when the loading warps have taken this tile: a tile claimed early is one that an idle thread block lacks.
      shared.box_empty.wait(turn & 1);
      if (rank == 0) {
        tile = params.counter.take(tiles, takers);
        shared.relay.send(turn, tile);
      } else {
        tile = shared.relay.receive(turn);
      }
    }
    __syncwarp();  // no lane writes into the box before lane 0 saw it empty
    tile = __shfl_sync(~0u, tile, 0);
  }
}

}  // namespace block_sparse::sm90
