// How the pieces of a pattern are grouped into tiles of the Hopper weight gradient.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gemm/sm90_back_work.h"
#include "work_list_back_grid.h"

namespace block_sparse {

// The M side of one warpgroup: one line (64 features), or two lines of 32 features that have many strips in common.
struct Bands {
  std::vector<int32_t> lines;  // [bands, lines of a band]; the second is the first again where no partner is left
  std::vector<int32_t> start;  // [bands + 1]
  std::vector<int32_t> strip;  // the strips that any of the band's lines uses, ascending
  std::vector<int32_t> piece;  // [strips, lines of a band], -1: this line has none
  int64_t size() const { return int64_t(start.size()) - 1; }
  int32_t length(int64_t band) const { return start[band + 1] - start[band]; }
};

// Two bands that one tile computes, one a warpgroup, and the strips in the order in which tiles take them.
struct BandPair {
  int32_t band[2];   // the same twice where no partner is left
  int32_t begin[2];  // into BandPairs::entries
  int32_t length[2];
  int32_t common;  // the first strips of both lists are the same
};

struct BandPairs {
  std::vector<BandPair> pairs;
  std::vector<int32_t> entries;  // into Bands::strip
};

struct Tile {
  int source;  // which of TileList's sources
  int32_t band[2];
  int32_t begin[2];  // into BandPairs::entries
  uint8_t count[2];
  uint8_t common;

  // M-side strips loaded.
  int lines(int piece) const { return (band[0] == band[1] ? 1 : 2) * back_lines(piece); }
  int strips() const { return count[0] + count[1] - common; }
  BackTileShape shape(int piece, bool transposed) const {
    return {transposed, lines(piece), strips(), {count[0], count[1]}, count[0] - common};
  }
};

// What tiles are cut from: all of a pattern's pieces, or some.
struct TileSource {
  int piece;
  bool transposed;  // M runs along x
  bool paired;      // a tile has two bands with many strips in common, one a warpgroup; else both share one
  std::shared_ptr<const Bands> bands;
  std::shared_ptr<const BandPairs> pairs;
};

// `lines` of dy, or of x if `transposed`.
std::shared_ptr<const Bands> make_bands(const BackTiling& tiling, const PieceLines& lines, bool transposed);
TileSource make_source(const BackTiling& tiling, std::shared_ptr<const Bands> bands, bool transposed, bool paired);

struct StageShape {
  int strips;    // that it has room for
  int quads;     // of a warpgroup, at most
  bool is_long;  // back_stage_tokens
};

struct TileList {
  std::vector<TileSource> sources;
  std::vector<Tile> tiles;

  int piece() const { return sources.front().piece; }
  BackTileShape shape(const Tile& tile) const { return tile.shape(piece(), sources[tile.source].transposed); }
  StageShape stage(const BackTiling& tiling) const;  // what all of its tiles need
};

// Adds tiles of at most `capacity` strips for both warpgroups together, in the order of their lines. `number`: the
// source's among TileList's.
void cut_tiles(const TileSource& source, int number, int capacity, std::vector<Tile>& tiles);

// Adds the parts, of at most `capacity` strips each, of one tile.
void cut_again(const Tile& tile, int piece, int capacity, std::vector<Tile>& tiles);

}  // namespace block_sparse
