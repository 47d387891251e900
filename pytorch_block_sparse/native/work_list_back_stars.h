// Tiles of equal size for the Hopper weight gradient: pieces that lie in one line of either operand. Pieces are the
// edges of a bipartite graph, lines its vertices, such tiles stars. (Where blocks are of whole pairs of strips,
// BackTiling::pairs_strips, vertices are pairs of lines, and edges 2 x 2 pieces.)
#pragma once

#include <cstdint>

#include "work_list_back_grid.h"

namespace block_sparse {

struct StarSides {
  PieceLines lines;
  PieceLines other_lines;  // of the other operand
};

// Takes the edges from piece `first` to `last`, counted along the lines of dy, or of x if `transposed`, and gives each
// to one of its ends such that, as far as can be, every vertex has a multiple of `size` of them. Most stay with those
// lines.
StarSides split_into_stars(const PieceGrid& grid, int64_t first, int64_t last, int size, bool transposed);

}  // namespace block_sparse
