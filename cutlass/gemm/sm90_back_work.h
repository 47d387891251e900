// The work list of the Hopper weight gradient: native/work_list_back.cpp writes it, block_task_back_sm90.h reads it.
// Plain C++, for host and device.
//
// A *strip* is `piece` (64 or 32) neighbouring features of one operand over all tokens, a *piece* the piece x piece
// outputs of one strip of dy and one strip of x. A *tile* is what a thread block computes in one sweep over the tokens:
// its two warpgroups each multiply 64 features of one operand (the M side, `lines`: strips of dy, or of x in a
// transposed tile) by a list of up to 384 features of the other operand (the N side, `strips`). The lists are gathered
// from anywhere, and what both warpgroups use is loaded once:
//
//   strips of a tile    [ lines | only warpgroup 0 | both | only warpgroup 1 ]
//                                 |<--- count[0] ------->|
//                                                  |<--- count[1] ------->|
//                                 |<--- start ---->|
//
// A *cell* is the square that lies in one stored block: a whole piece, or, where a side of the block is no multiple of
// 32, a quarter of one (16 x 16).
//
//   list       header [8]: tiles, strips that a stage has room for, most quads of a warpgroup, whether stages are long
//              directory [tiles, 2]: word where the tile's record starts, BackTileShape; waves of tiles, the costliest
//              wave first
//              records
//   record     strips, uint16 [lines + strips], padded to a word
//              slots of warpgroup 0, int32 [64 / cell, count[0] * piece / cell]: a cell's slot, -1 where none is stored
//              slots of warpgroup 1, the same
#pragma once

#include <cstdint>

namespace block_sparse {

constexpr int kBackHeaderWords = 8;
constexpr int kBackWarpgroups = 2;
constexpr int kBackM = 64;        // features of a warpgroup's M side
constexpr int kBackMaxQuads = 6;  // a *quad* is 64 features of a warpgroup's N side: the accumulator holds 64 x 384

constexpr int back_piece(int64_t block_height, int64_t block_width) {
  return block_height % 64 == 0 && block_width % 64 == 0 ? 64 : 32;
}

constexpr int back_cell(int64_t block_height, int64_t block_width) {
  return block_height % 32 == 0 && block_width % 32 == 0 ? back_piece(block_height, block_width) : 16;
}

// Tokens of a stage: a stage has its cost however little is in it, but more are under way if they are short.
constexpr int back_stage_tokens(bool long_stages) { return long_stages ? 64 : 32; }
constexpr int kBackLongStageQuads = 2;      // of a warpgroup, at most, in a list of long stages
constexpr int kBackRingBytes = 224 * 1024;  // of all stages together, at most
constexpr int kBackMaxStages = 12;
constexpr int back_stage_count(int stage_bytes) {
  return kBackRingBytes / stage_bytes < kBackMaxStages ? kBackRingBytes / stage_bytes : kBackMaxStages;
}

// M-side strips of one warpgroup.
constexpr int back_lines(int piece) { return kBackM / piece; }

// N-side strips that one warpgroup can take.
constexpr int back_max_strips(int piece) { return kBackMaxQuads * 64 / piece; }

struct BackTileShape {
  bool transposed;  // M runs along x, N along dy
  int lines;        // strips of the M side: warpgroup 0 has the first back_lines(piece), warpgroup 1 the last
  int strips;       // strips of the N side
  int count[kBackWarpgroups];
  int start;  // first N-side strip of warpgroup 1

  constexpr uint32_t encode() const {
    return uint32_t(transposed) | uint32_t(lines) << 1 | uint32_t(strips) << 4 | uint32_t(count[0]) << 9 |
           uint32_t(count[1]) << 13 | uint32_t(start) << 17;
  }
  static constexpr BackTileShape decode(uint32_t word) {
    return {(word & 1) != 0,
            int(word >> 1 & 7),
            int(word >> 4 & 31),
            {int(word >> 9 & 15), int(word >> 13 & 15)},
            int(word >> 17 & 15)};
  }

  constexpr int loaded() const { return lines + strips; }
  // No indexed access: the array must stay in registers.
  constexpr int taken(int warpgroup) const { return warpgroup == 0 ? count[0] : count[1]; }
  constexpr int quads(int warpgroup, int piece) const { return (taken(warpgroup) * piece + 63) / 64; }
  constexpr int quads(int piece) const { return quads(0, piece) + quads(1, piece); }
  constexpr int first_line(int warpgroup, int piece) const { return warpgroup == 0 ? 0 : lines - back_lines(piece); }
  constexpr int first_strip(int warpgroup) const { return lines + (warpgroup == 0 ? 0 : start); }
};

// Words from the start of a record to the slots of a warpgroup.
constexpr int back_slots_offset(const BackTileShape& shape, int warpgroup, int piece, int cell) {
  int strip_words = (shape.loaded() + 1) / 2;
  return strip_words + (warpgroup == 0 ? 0 : (kBackM / cell) * shape.count[0] * (piece / cell));
}

constexpr int back_record_words(const BackTileShape& shape, int piece, int cell) {
  return back_slots_offset(shape, 1, piece, cell) + (kBackM / cell) * shape.count[1] * (piece / cell);
}

// Nanoseconds that a tile takes per token on the H200, if it has memory to itself (native/work_list_back_model.cpp
// knows better): the tensor cores (a quad is 64 x 64 multiply-adds) or the copy engine, whose rate is per row of a box,
// so that a strip of 32 features costs more than half a strip of 64. Tiles are ordered and cut by it.
constexpr float back_token_ns(int quads, int loaded, int piece) {
  const float tensor = 1.44f * float(quads), copy = (piece == 64 ? 1.26f : 0.77f) * float(loaded);
  const float slower = tensor > copy ? tensor : copy;
  return slower > 4.f ? slower : 4.f;
}

// Cutting a tile into token ranges costs a pass of its partial sums through L2: per quad and range, and once.
constexpr float kBackSplitNs = 3000.f;
constexpr float kBackSplitQuadNs = 200.f;

constexpr float back_split_ns(int quads, int splits) {
  return splits == 1 ? 0.f : kBackSplitNs + kBackSplitQuadNs * float(quads * splits);
}

// The number of token ranges, at most `limit`, that makes a tile of `tile_ns` fastest.
constexpr int back_splits(float tile_ns, int quads, int limit) {
  int splits = 1;
  while (splits < limit && tile_ns > kBackSplitQuadNs * float(quads * splits * (splits + 1))) ++splits;
  return tile_ns / float(splits) + back_split_ns(quads, splits) < tile_ns ? splits : 1;
}

constexpr int kBackMaxSplits = 32;

constexpr int kBackPaceSteps = 32;  // stages from one look to the next, a power of two
// Thread blocks that publish how far they are (sm90_back_pace.h); others only look.
constexpr int kBackPaceBlocks = 128;

// Floats of one warpgroup's partial sums.
constexpr int64_t back_partial_floats(int largest_quads) { return int64_t(64 * 64) * largest_quads; }

}  // namespace block_sparse
