#include "work_list_back_grid.h"

#include <algorithm>
#include <utility>

#include "gemm/sm90_back_work.h"

namespace block_sparse {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks that are whole numbers of pieces: every piece has one slot.
void add_whole_pieces(const Geometry& geometry, const PatternIndex& index, PieceGrid& grid) {
  const int64_t tall = geometry.block_height / grid.tiling.piece, wide = geometry.block_width / grid.tiling.piece;
  PieceLines& lines = grid.by_row;
  for (int64_t row = 0; row < geometry.grid_rows(); ++row) {
    for (int64_t line = 0; line < tall; ++line) {
      for (int32_t entry = index.crow_indices[row]; entry < index.crow_indices[row + 1]; ++entry) {
        for (int64_t strip = 0; strip < wide; ++strip) {
          lines.strip.push_back(int32_t(index.col_indices[entry] * wide + strip));
          lines.piece.push_back(int32_t(grid.slots.size()));
          grid.slots.push_back(index.row_slots[entry]);
        }
      }
      lines.start.push_back(int32_t(lines.strip.size()));
    }
  }
}

// Blocks with a side that is an odd multiple of 16: a piece has 2 x 2 cells, perhaps of several blocks.
void add_cells(const Geometry& geometry, const PatternIndex& index, PieceGrid& grid) {
  constexpr int kCells = 2;
  const int64_t tall = geometry.block_height / grid.tiling.cell, wide = geometry.block_width / grid.tiling.cell;
  PieceLines& lines = grid.by_row;
  struct Cell {
    int64_t strip;
    int place;  // in the piece
    int32_t slot;
  };
  std::vector<Cell> cells;
  for (int64_t line = 0; line < grid.tiling.piece_rows; ++line) {
    cells.clear();
    for (int upper = 0; upper < kCells; ++upper) {
      const int64_t row = (line * kCells + upper) / tall;
      if (row >= geometry.grid_rows()) continue;
      for (int32_t entry = index.crow_indices[row]; entry < index.crow_indices[row + 1]; ++entry) {
        for (int64_t column = index.col_indices[entry] * wide; column < (index.col_indices[entry] + 1) * wide;
             ++column) {
          cells.push_back({column / kCells, int(upper * kCells + column % kCells), index.row_slots[entry]});
        }
      }
    }
    std::sort(cells.begin(), cells.end(), [](const Cell& a, const Cell& b) { return a.strip < b.strip; });
    for (size_t i = 0; i < cells.size(); ++i) {
      if (i == 0 || cells[i].strip != cells[i - 1].strip) {
        lines.strip.push_back(int32_t(cells[i].strip));
        lines.piece.push_back(int32_t(grid.slots.size() / (kCells * kCells)));
        grid.slots.insert(grid.slots.end(), kCells * kCells, -1);
      }
      grid.slots[grid.slots.size() - kCells * kCells + cells[i].place] = cells[i].slot;
    }
    lines.start.push_back(int32_t(lines.strip.size()));
  }
}

PieceLines transposed(const PieceLines& lines, int64_t strips) {
  PieceLines result;
  result.start.assign(strips + 1, 0);
  for (int32_t strip : lines.strip) ++result.start[strip + 1];
  for (int64_t strip = 0; strip < strips; ++strip) result.start[strip + 1] += result.start[strip];
  result.strip.resize(lines.strip.size());
  result.piece.resize(lines.strip.size());
  std::vector<int32_t> next(result.start.begin(), result.start.end() - 1);
  for (int64_t line = 0; line < lines.lines(); ++line) {
    for (int32_t entry = lines.start[line]; entry < lines.start[line + 1]; ++entry) {
      const int32_t to = next[lines.strip[entry]]++;
      result.strip[to] = int32_t(line);
      result.piece[to] = lines.piece[entry];
    }
  }
  return result;
}

}  // namespace

PieceLines only(const PieceLines& lines, const PieceSet& pieces) {
  PieceLines result;
  result.start.push_back(0);
  for (int64_t line = 0; line < lines.lines(); ++line) {
    for (int32_t entry = lines.start[line]; entry < lines.start[line + 1]; ++entry) {
      if (!pieces[lines.piece[entry]]) continue;
      result.strip.push_back(lines.strip[entry]);
      result.piece.push_back(lines.piece[entry]);
    }
    result.start.push_back(int32_t(result.strip.size()));
  }
  return result;
}

BackTiling::BackTiling(const Geometry& geometry)
    : piece(back_piece(geometry.block_height, geometry.block_width)),
      cell(back_cell(geometry.block_height, geometry.block_width)),
      piece_rows(divide_up(geometry.grid_rows() * geometry.block_height, piece)),
      piece_columns(divide_up(geometry.grid_cols() * geometry.block_width, piece)),
      pairs_strips(geometry.block_height % (2 * piece) == 0 && geometry.block_width % (2 * piece) == 0) {
  // Also where a block starts in the middle of a piece: then its side is an odd number of cells.
  const int64_t pieces_of_block = divide_up(geometry.block_height, piece) * divide_up(geometry.block_width, piece);
  max_pieces = std::min(geometry.nnz * pieces_of_block, piece_rows * piece_columns);
}

PieceGrid::PieceGrid(const Geometry& geometry, const PatternIndex& index) : tiling(geometry) {
  by_row.start.reserve(tiling.piece_rows + 1);
  by_row.start.push_back(0);
  by_row.strip.reserve(tiling.max_pieces);
  by_row.piece.reserve(tiling.max_pieces);
  slots.reserve(tiling.max_pieces * tiling.cells() * tiling.cells());
  if (tiling.cell == tiling.piece) {
    add_whole_pieces(geometry, index, *this);
  } else {
    add_cells(geometry, index, *this);
  }
  by_column = transposed(by_row, tiling.piece_columns);
}

}  // namespace block_sparse
