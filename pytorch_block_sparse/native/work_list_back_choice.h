// Which tiles the Hopper weight gradient's work list has.
#pragma once

#include "work_list_back_model.h"

namespace block_sparse {

// The list that the model takes for the fastest, of at most `limit` tiles.
TileList choose_tiles(const PieceGrid& grid, int64_t limit);

// Patterns of so few pieces that tiles of one or two of them make one wave; then choose_small_tiles is the list of
// those.
bool has_small_tiles(const BackTiling& tiling);
TileList choose_small_tiles(const PieceGrid& grid);

}  // namespace block_sparse
