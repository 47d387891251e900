// Which tile, and which of its tokens, a thread block of the Hopper weight gradient works on next.
//
// All thread blocks sweep the tokens together, because the strips of a wave exceed L2: a strip's rows are shared only
// while every reader is at about the same token. So tiles go out in waves of one full-length tile each, and only the
// last wave, when it would leave multiprocessors idle, is cut into equal token ranges.
#pragma once

#include <cute/arch/util.hpp>

#include "gemm/sm90_back_work.h"

namespace block_sparse {

// How the list's strips share out the ring.
struct BackStages {
  int count;
  int tokens;  // of a stage
  int strip_bytes;
  int bytes;  // of a stage
};

struct BackItem {
  int tile;            // in the list's order; -1: nothing left
  int first_step;      // stages of tokens
  int last_step;       // exclusive
  int part;            // which token range of the tile
  int last_wave_tile;  // the tile's number in the last wave
};

struct BackSchedule {
  int thread_blocks;
  int steps;       // stages of a full sweep
  int full_waves;  // waves without a cut
  int rest;        // tiles of the last wave
  int splits;      // token ranges of each tile of the last wave

  CUTE_DEVICE BackSchedule(const int32_t* work, int tiles, int thread_blocks, int tokens, int stage_tokens, int piece,
                           bool may_split)
      : thread_blocks(thread_blocks), steps((tokens + stage_tokens - 1) / stage_tokens), splits(1) {
    full_waves = tiles / thread_blocks;
    rest = tiles - full_waves * thread_blocks;
    if (rest == 0 || !may_split) return;
    int limit = min(min(thread_blocks / rest, steps), kBackMaxSplits);
    if (limit == 1) return;
    const uint32_t word = __ldg(work + kBackHeaderWords + 2 * full_waves * thread_blocks + 1);  // the wave's costliest
    BackTileShape shape = BackTileShape::decode(word);
    float tile_ns = back_token_ns(shape.quads(piece), shape.loaded(), piece) * float(tokens);
    splits = back_splits(tile_ns, shape.quads(piece), limit);
  }

  CUTE_DEVICE BackItem item(int thread_block, int wave) const {
    if (wave < full_waves) return {wave * thread_blocks + thread_block, 0, steps, 0, -1};
    // Range by range: neighbours work on the same tokens.
    int part = thread_block / max(rest, 1);
    if (wave > full_waves || rest == 0 || part >= splits) return {-1, 0, 0, 0, -1};
    int last_wave_tile = thread_block - part * rest;
    return {full_waves * thread_blocks + last_wave_tile, int(int64_t(steps) * part / splits),
            int(int64_t(steps) * (part + 1) / splits), part, splits > 1 ? last_wave_tile : -1};
  }
};

}  // namespace block_sparse
