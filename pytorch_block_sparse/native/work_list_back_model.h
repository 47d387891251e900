// How long the Hopper weight gradient takes for a list of tiles, on an H200: what the planner compares lists by.
#pragma once

#include "work_list_back_tiles.h"

namespace block_sparse {

// Microseconds.
float predict_back_time(const TileList& list, const BackTiling& tiling);

}  // namespace block_sparse
