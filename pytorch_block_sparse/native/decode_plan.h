// The kernel for few tokens (block_task_decode.h): which products it serves, and how. No torch header, no CUDA.
#pragma once

#include "problem.h"
#include "product.h"

namespace block_sparse {

constexpr int64_t kMostDecodeTokens = 64;

// Whether it serves a product of 16-byte aligned values.
bool decode_serves(Direction direction, DType dtype, const Geometry& geometry, int64_t tokens);

// Which kernel runs a product, of those that serve it. The one for few tokens takes less time than Hopper's, which on
// the H200 is so (4096 to 14336 features, density .25: forward 11 to 20 µs for 20 to 29, input gradient 15 to 44 for 45
// to 103) but for the forward of many tokens in blocks of 16 (42 for 35).
Kernel choose_kernel(Direction direction, const Geometry& geometry, int64_t tokens, bool decode, bool hopper);

// A thread block computes `rows` features of a line for `token_tiles` x 8 tokens.
struct DecodeTile {
  int rows;         // 16, 32 or 64
  int token_tiles;  // 1, 2, 4 or 8
};

// Warps of a multiprocessor for which the registers suffice.
constexpr int decode_resident_warps(DecodeTile tile) {
  if (tile.rows == 16) return tile.token_tiles == 1 ? 32 : 24;
  return tile.rows == 64 && tile.token_tiles == 8 ? 8 : 16;
}

// Whether tokens come through the L1 cache. Few of them stay in it, and 16 rows read them most often.
constexpr bool decode_caches_tokens(DecodeTile tile) { return tile.rows == 16 && tile.token_tiles <= 2; }

// Chunks that a warp has under way, and the one that it multiplies.
constexpr int decode_stages(DecodeTile tile) { return tile.token_tiles <= 2 ? 3 : 2; }

// Of shared memory: a warp's ring, then its float32 sums.
constexpr int decode_warp_bytes(DecodeTile tile) {
  const int ring = decode_stages(tile) * 64 * (tile.rows + 8 * tile.token_tiles);
  const int sums = 4 * 8 * tile.token_tiles * (tile.rows + 4);
  return ring > sums ? ring : sums;
}

struct DecodePlan {
  DecodeTile tile;
  int warps;  // of a thread block: they share out a line's blocks
};

DecodePlan plan_decode(Direction direction, const Geometry& geometry, int64_t tokens, int multiprocessors);

}  // namespace block_sparse
