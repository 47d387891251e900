// The pattern as the Hopper weight gradient sees it: pieces of 64 x 64 or 32 x 32 outputs, by lines of either operand.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"

namespace block_sparse {

// How blocks are cut into pieces and cells (cutlass/gemm/sm90_back_work.h says what those are).
struct BackTiling {
  int piece;
  int cell;
  int64_t piece_rows;     // strips of dy
  int64_t piece_columns;  // strips of x
  int64_t max_pieces;     // that hold a stored block, at most
  bool pairs_strips;      // blocks are of whole pairs of strips, on both sides

  explicit BackTiling(const Geometry& geometry);
  int cells() const { return piece / cell; }  // along a side of a piece
  int star_strips() const { return pairs_strips ? 2 : 1; }
  // Of the operand that N runs along: x, or dy where tiles are transposed.
  int64_t strips(bool transposed) const { return transposed ? piece_rows : piece_columns; }
};

// Compressed lists: line l holds entries start[l] .. start[l + 1].
struct PieceLines {
  std::vector<int32_t> start;
  std::vector<int32_t> strip;  // of the other operand, ascending within a line
  std::vector<int32_t> piece;  // number in PieceGrid::slots
  int64_t lines() const { return int64_t(start.size()) - 1; }
  int32_t length(int64_t line) const { return start[line + 1] - start[line]; }
};

using PieceSet = std::vector<bool>;  // by number

// The same lines with none but these pieces.
PieceLines only(const PieceLines& lines, const PieceSet& pieces);

struct PieceGrid {
  BackTiling tiling;
  std::vector<int32_t> slots;  // [pieces, cells, cells] row-major: a cell's slot, -1 where none is stored
  PieceLines by_row;           // lines: strips of dy
  PieceLines by_column;        // lines: strips of x

  const PieceLines& lines(bool transposed) const { return transposed ? by_column : by_row; }

  PieceGrid(const Geometry& geometry, const PatternIndex& index);
};

}  // namespace block_sparse
