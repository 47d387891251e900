// Work lists of the Hopper dense x sparse kernels: what the host builds once a pattern and the kernels walk. Plain
// structs, the same for host and device; no CUDA header.
//
// Blocks are cut into square pieces of 64, 32 or 16 elements, numbered through `values` seen as [nnz * bh / side,
// bw / side] squares, row-major. Lines are strips of `side` outputs (features of y forward, of x for the input
// gradient); a group is as many lines as one thread block computes. Chunks are strips of 64 inputs. An item is one
// chunk that at least one line of a group needs.
#pragma once

#include <cstdint>
#include <type_traits>

namespace block_sparse::sm90 {

constexpr int kChunk = 64;

// Pieces of 64: a group is two lines.
struct WideWork {
  static constexpr int kRanks = 1;
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

// Pieces of 32 or 16: a group is 256 outputs, computed by a cluster of two thread blocks (ranks) of two halves each. A
// quarter, one half of one rank, is as many lines as fill 64 outputs, one matrix instruction's M.
template <int kSide_>
struct ClusterWork {
  static constexpr int kSide = kSide_;
  static constexpr int kRanks = 2;
  static constexpr int kHalves = 2;
  static constexpr int kQuarters = kRanks * kHalves;  // quarter rank * kHalves + half
  static constexpr int kQuarterLines = 64 / kSide;
  static constexpr int kGroupLines = kQuarters * kQuarterLines;
  static constexpr int kParts = kChunk / kSide;  // of a chunk
  static constexpr int kMaskBits = kQuarterLines * kParts;
  using Mask = std::conditional_t<kMaskBits <= 8, uint8_t, uint16_t>;
  static_assert(kMaskBits <= 16);

  // The two ranks take an item together. Where both need a chunk they share it, else each has a chunk of its own.
  struct Item {
    int32_t chunk[kRanks];  // -1 where a rank has none
    Mask mask[kQuarters];   // bit part * kQuarterLines + line: the quarter's line has a block at that part of the chunk
  };

  struct Group {
    int32_t first_item;
    int32_t items;
    int32_t first_piece[kQuarters];  // into pieces, where those of a quarter lie in the order of items and bits
    int32_t unused[2];
    int32_t first_feature[kGroupLines];  // of each line; past the last feature where the group has no such line
  };

  const Group* groups;  // [2 * count]
  const Item* items;
  const int32_t* pieces;  // numbers
  int32_t piece_count;

  static constexpr Item empty_item() { return {{-1, -1}, {0, 0, 0, 0}}; }
};

}  // namespace block_sparse::sm90
