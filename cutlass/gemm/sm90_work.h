// Work lists of the Hopper dense x sparse kernels: what the host builds once a pattern and the kernels walk. Plain
// structs, the same for host and device; no CUDA header.
//
// Blocks are cut into square pieces of 64, 32 or 16 elements, numbered through `values` seen as [nnz * bh / side,
// bw / side] squares, row-major. Lines are strips of `side` outputs (features of y forward, of x for the input
// gradient); a group is as many lines as one thread block computes. Chunks are strips of 64 inputs. An item is one
// chunk that at least one line of a group needs.
#pragma once

#include <cstdint>

namespace block_sparse::sm90 {

constexpr int kChunk = 64;

// Pieces of 64: a group is two lines.
struct WideWork {
  static constexpr int kGroupLines = 2;

  struct Item {
    int32_t chunk;
    int32_t pieces[kGroupLines];  // of each line, or -1
    int32_t unused;
  };

  struct Group {
    int32_t first_item;
    int32_t items;
    int32_t first_feature[kGroupLines];  // of each line; past the last feature where the group has no such line
  };

  const Group* groups;  // [2 * count]: in raster order, then again longest first
  const Item* items;

  // An empty group still sends one item, so that its tile is stored.
  static constexpr Item empty_item() { return {0, {-1, -1}, 0}; }
};

// Pieces of 32 or 16: a group is 256 outputs in two halves of 128.
template <int kSide_>
struct NarrowWork {
  static constexpr int kSide = kSide_;
  static constexpr int kHalves = 2;
  static constexpr int kHalfLines = 128 / kSide;
  static constexpr int kGroupLines = kHalves * kHalfLines;
  static constexpr int kChunkParts = kChunk / kSide;
  static_assert(kHalfLines * kChunkParts <= 32, "one mask word a half");

  struct Item {
    int32_t chunk;
    int32_t first_piece;     // into pieces: those of half 0, then of half 1, in the order of their bits
    uint32_t mask[kHalves];  // bit part * kHalfLines + line: the half's line has a block at that part of the chunk
  };

  struct Group {
    int32_t first_item;
    int32_t items;
    int32_t unused[2];
    int32_t first_feature[kGroupLines];
  };

  // A piece's number, and the bit it belongs to.
  static constexpr int kPieceBits = 27;
  static constexpr int32_t pack_piece(int64_t number, int bit) {
    return int32_t(uint32_t(number) | uint32_t(bit) << kPieceBits);
  }

  const Group* groups;  // [2 * count]
  const Item* items;
  const int32_t* pieces;  // pack_piece

  static constexpr Item empty_item() { return {0, 0, {0, 0}}; }
};

}  // namespace block_sparse::sm90
