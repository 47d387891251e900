// Which thread block of the Hopper weight gradient computes which tiles.
#pragma once

#include <cstdint>
#include <vector>

#include "work_list_back_tiles.h"

namespace block_sparse {

constexpr int kBackThreadBlocks = 132;  // multiprocessors of an H100 or H200: on others lists are right, but slower

// Tile numbers, the costliest first, else in their own order: neighbours share strips.
std::vector<int32_t> costliest_first(const std::vector<Tile>& tiles, int piece);

// The same in the list's order: tile i is thread block i % kBackThreadBlocks' in wave i / kBackThreadBlocks. A wave's
// tiles are of like cost, because the thread blocks sweep the tokens together. Pieces of 32: the costliest of a wave go
// to the thread blocks that have had least, and a partial last wave to those that are done first.
std::vector<int32_t> order_tiles(const std::vector<Tile>& tiles, int piece);

}  // namespace block_sparse
