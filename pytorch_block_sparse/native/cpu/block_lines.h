// Forward and input gradient seen as one problem, and its division into equal shares of work.
#pragma once

#include <cstdint>

#include "../problem.h"

namespace block_sparse::cpu {

// A line is a block row in the forward and a block column in the input gradient: the blocks that are summed into the
// same n outputs. An entry is a stored block in the order of the lines.
struct BlockLines {
  int64_t lines;
  const int32_t* offsets;   // [lines + 1]
  const int32_t* partners;  // [nnz]  the block's place along the summed dimension
  const int32_t* slots;     // [nnz]
  int64_t n;                // block side along the outputs
  int64_t k;                // block side along the sum
  int64_t n_total;          // O or I
  int64_t k_total;          // I or O
};

BlockLines block_lines(const DenseSparseProblem& problem);

// The smallest piece of work: the outputs of one panel (a tile's width) of a line.
struct Unit {
  int64_t line;
  int64_t panel;
};

// Where share `part` of `parts` begins among lines [first, last). A unit costs its line's blocks, and one for its
// output.
Unit share_begin(const BlockLines& lines, int64_t panels, int64_t first, int64_t last, int64_t part, int64_t parts);

}  // namespace block_sparse::cpu
