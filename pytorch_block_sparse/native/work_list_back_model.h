// How long the Hopper weight gradient takes for a list of tiles, on an H200: what the planner compares lists by.
#pragma once

#include <vector>

#include "work_list_back_tiles.h"

namespace block_sparse {

// What a list of tiles is cut from.
struct TileList {
  TileSource sources[2];  // the second only where tiles are regrouped
  std::vector<Tile> tiles;

  int piece() const { return sources[0].orientation->piece; }
  BackTileShape shape(const Tile& tile) const {
    return tile.shape(piece(), sources[tile.source].orientation->transposed);
  }
};

// Microseconds.
float predict_back_time(const TileList& list, const BackTiling& tiling);

}  // namespace block_sparse
