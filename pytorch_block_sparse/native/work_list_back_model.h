// How long the Hopper weight gradient takes for a list of tiles, on an H200: what the planner compares lists by.
#pragma once

#include <vector>

#include "work_list_back_tiles.h"

namespace block_sparse {

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
  StageShape stage() const;
};

// Microseconds.
float predict_back_time(const TileList& list, const BackTiling& tiling);

}  // namespace block_sparse
