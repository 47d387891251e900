#include "work_list_back_order.h"

#include <algorithm>
#include <numeric>

namespace block_sparse {
namespace {

int tile_cost(const Tile& tile, int piece) {  // picoseconds per token
  const BackTileShape shape = tile.shape(piece, false);
  return int(1000.f * back_token_ns(shape.quads(piece), shape.loaded(), piece));
}

}  // namespace

std::vector<int32_t> costliest_first(const std::vector<Tile>& tiles, int piece) {
  constexpr int kBucket = 10, kBuckets = 64 * 1000 / kBucket;
  std::vector<int32_t> start(kBuckets + 1, 0), order(tiles.size());
  const auto bucket = [&](const Tile& tile) {
    return kBuckets - 1 - std::min(tile_cost(tile, piece) / kBucket, kBuckets - 1);
  };
  for (const Tile& tile : tiles) ++start[bucket(tile) + 1];
  for (int i = 0; i < kBuckets; ++i) start[i + 1] += start[i];
  for (size_t i = 0; i < tiles.size(); ++i) order[start[bucket(tiles[i])]++] = int32_t(i);
  return order;
}

TileOrder order_tiles(const std::vector<Tile>& tiles, int piece, float tokens) {
  const std::vector<int32_t> sorted = costliest_first(tiles, piece);
  const int64_t full_waves = int64_t(sorted.size()) / kBackThreadBlocks;
  const int64_t rest = int64_t(sorted.size()) % kBackThreadBlocks, full = full_waves * kBackThreadBlocks;
  TileOrder order{sorted, 0, 0.f};
  std::vector<int64_t> load(kBackThreadBlocks, 0);
  std::vector<int32_t> columns(kBackThreadBlocks), assigned(full);  // a column becomes a thread block
  std::iota(columns.begin(), columns.end(), 0);
  const auto least_loaded_first = [&] {
    std::iota(columns.begin(), columns.end(), 0);
    std::stable_sort(columns.begin(), columns.end(), [&](int32_t a, int32_t b) { return load[a] < load[b]; });
  };
  for (int64_t wave = 0; wave < full_waves; ++wave) {
    least_loaded_first();
    for (int64_t i = 0; i < kBackThreadBlocks; ++i) {
      const int32_t tile = sorted[wave * kBackThreadBlocks + i];
      assigned[wave * kBackThreadBlocks + columns[i]] = tile;
      load[columns[i]] += tile_cost(tiles[tile], piece);
    }
  }
  least_loaded_first();
  for (int64_t i = 0; i < full; ++i) {
    order.tiles[i] = assigned[i / kBackThreadBlocks * kBackThreadBlocks + columns[i % kBackThreadBlocks]];
  }
  const auto load_ns = [&](int64_t thread_block) { return tokens * 0.001f * float(load[columns[thread_block]]); };
  order.end_ns = load_ns(kBackThreadBlocks - 1);
  if (rest == 0) return order;

  const float waves_ns = order.end_ns;
  for (int64_t i = 0; i < rest; ++i) {
    order.end_ns =
        std::max(order.end_ns, load_ns(i) + tokens * 0.001f * float(tile_cost(tiles[sorted[full + i]], piece)));
  }
  const BackTileShape costliest = tiles[sorted[full]].shape(piece, false);
  const int quads = costliest.quads(piece);
  const float tile_ns = tokens * back_token_ns(quads, costliest.loaded(), piece);
  for (int clusters = 1; clusters <= kBackMaxClusters; ++clusters) {
    const int64_t used = clusters * kBackCluster * rest;
    if (used > kBackThreadBlocks) break;
    const float end_ns = std::max(waves_ns, load_ns(used - 1) + back_cut_tile_ns(tile_ns, quads, clusters));
    if (end_ns < order.end_ns) order.end_ns = end_ns, order.clusters = clusters;
  }
  return order;
}

}  // namespace block_sparse
