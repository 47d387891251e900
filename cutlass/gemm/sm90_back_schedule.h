// Which tile, and which of its tokens, a thread block of the Hopper weight gradient works on next.
//
// All thread blocks sweep the tokens together, because the strips of a wave exceed L2: a strip's rows are shared only
// while every reader is at about the same token. So tiles go out in waves of one full-length tile each, and only the
// last wave, when it would leave multiprocessors idle, is cut into equal token ranges, one a thread block of a cluster.
#pragma once

#include <cute/arch/util.hpp>

#include "gemm/sm90_back_work.h"

namespace block_sparse {

struct BackItem {
  int tile;            // in the list's order; -1: nothing left
  int first_step;      // stages of kStageTokens tokens
  int last_step;       // exclusive
  int cluster;         // which of the tile's clusters; -1: the tile is not cut
  int last_wave_tile;  // the tile's number in the last wave
};

struct BackSchedule {
  int thread_blocks;  // a multiple of kBackCluster
  int steps;          // stages of a full sweep
  int full_waves;     // waves without a cut
  int rest;           // tiles of the last wave
  int clusters;       // that each tile of the last wave is cut for; 0: not cut

  CUTE_DEVICE BackSchedule(const int32_t* work, int tiles, int thread_blocks, int tokens, int stage_tokens, int piece,
                           bool may_split, int most_clusters)
      : thread_blocks(thread_blocks), steps((tokens + stage_tokens - 1) / stage_tokens), clusters(0) {
    full_waves = tiles / thread_blocks;
    rest = tiles - full_waves * thread_blocks;
    if (rest == 0 || !may_split) return;
    if (thread_blocks != kBackThreadBlocks) most_clusters = kBackMaxClusters;  // the list knows nothing about those
    const int limit = min(min(thread_blocks / kBackCluster / rest, steps / kBackCluster), most_clusters);
    if (limit == 0) return;
    const uint32_t word = __ldg(work + kBackHeaderWords + 2 * full_waves * thread_blocks + 1);  // the wave's costliest
    const BackTileShape shape = BackTileShape::decode(word);
    const float tile_ns = back_token_ns(shape.quads(piece), shape.loaded(), piece) * float(tokens);
    clusters = back_clusters(tile_ns, shape.quads(piece), limit);
  }

  CUTE_DEVICE BackItem item(int thread_block, int wave) const {
    if (wave < full_waves) return {wave * thread_blocks + thread_block, 0, steps, -1, 0};
    if (wave > full_waves || rest == 0) return {-1, 0, 0, -1, 0};
    const int first = full_waves * thread_blocks;
    if (clusters == 0) return {thread_block < rest ? first + thread_block : -1, 0, steps, -1, 0};
    // Neighbouring clusters work on the same tokens of different tiles.
    const int number = thread_block / kBackCluster, cluster = number / rest, tile = number - cluster * rest;
    if (cluster >= clusters) return {-1, 0, 0, -1, 0};
    const int ranges = clusters * kBackCluster, range = cluster * kBackCluster + thread_block % kBackCluster;
    return {first + tile, int(int64_t(steps) * range / ranges), int(int64_t(steps) * (range + 1) / ranges), cluster,
            tile};
  }
};

}  // namespace block_sparse
