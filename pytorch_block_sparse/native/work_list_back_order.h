// Which thread block of the Hopper weight gradient computes which tiles.
#pragma once

#include <cstdint>
#include <vector>

#include "work_list_back_tiles.h"

namespace block_sparse {

// Tile i belongs to thread block i % kBackThreadBlocks, in wave i / kBackThreadBlocks.
struct TileOrder {
  std::vector<int32_t> tiles;  // numbers
  int clusters;                // that a tile of the last, partial wave is cut for; 0: not cut
  float end_ns;                // when the last thread block is done, by the cost of its tiles alone
};

// Tile numbers, the costliest first, else in their own order: neighbours share strips.
std::vector<int32_t> costliest_first(const std::vector<Tile>& tiles, int piece);

// Waves of tiles of like cost, so that all thread blocks sweep the tokens together; within a wave the costliest tiles
// go to the thread blocks that have had least, and the tiles of a partial last wave to the first to be done, cut into
// ranges as far as that ends sooner.
TileOrder order_tiles(const std::vector<Tile>& tiles, int piece, float tokens);

}  // namespace block_sparse
