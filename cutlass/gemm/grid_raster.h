// From a thread block's number to its piece of work.
#pragma once

#include <cute/tensor.hpp>

namespace block_sparse {

// dense x sparse: (token tile, line group). Thread blocks that run together cover a strip of a few token tiles and many
// line groups, so that the strip's tokens and the blocks of W are read from L2. Within a strip the groups come in
// order: a longest-first line order therefore starts the long ones first.
struct StripRaster {
  static constexpr int kStripTokens = 1024;

  int token_tiles;
  int line_groups;
  int strip;  // token tiles of a strip

  struct Tile {
    int token_tile;
    int line_group;
  };

  CUTE_HOST_DEVICE int64_t size() const { return int64_t(token_tiles) * line_groups; }

  CUTE_DEVICE Tile operator()(unsigned block) const {
    unsigned full = unsigned(strip) * line_groups;
    unsigned strip_index = block / full;
    unsigned rest = block % full;
    unsigned first = strip_index * strip;
    unsigned width = min(unsigned(strip), token_tiles - first);  // the last strip may be narrower
    return {int(first + rest % width), int(rest / width)};
  }
};

// dense x dense on support: which block row, and which of its entries, thread block `tile` works on. A row of n entries
// takes ceil(n / kGroup) tiles. Row r begins at tile floor(offset(r) / kGroup) + r, which leaves room for them whatever
// the lengths, so a search replaces a work list; at most one tile a row stays empty.
template <int kGroup>
struct RowEntryRaster {
  int64_t rows;
  int64_t entries;

  CUTE_HOST_DEVICE int64_t size() const { return entries / kGroup + rows; }

  struct Tile {
    int64_t row;
    int64_t first;  // entry within the row
    int count;      // 0: nothing to do
  };

  // All 32 lanes of a warp search together. `offset(r)` is the number of entries before row r, r <= rows.
  template <class Offset>
  CUTE_DEVICE Tile find(int64_t tile, int lane, Offset offset) const {
    int64_t low = 0;
    int64_t high = rows;
    while (high - low > 1) {
      int64_t step = (high - low + 31) / 32;
      int64_t probe = low + lane * step;
      bool reached = probe < high && offset(probe) / kGroup + probe <= tile;
      int last = 31 - __clz(__ballot_sync(~0u, reached));
      low += last * step;
      high = min(high, low + step);
    }
    int64_t begin = offset(low);
    int64_t length = offset(low + 1) - begin;
    int64_t local = tile - (begin / kGroup + low);
    int64_t tiles = (length + kGroup - 1) / kGroup;
    if (local >= tiles) return {low, 0, 0};
    int64_t first = local * length / tiles;  // equal shares, so that the tiles of a row take equal time
    return {low, first, int((local + 1) * length / tiles - first)};
  }
};

}  // namespace block_sparse
