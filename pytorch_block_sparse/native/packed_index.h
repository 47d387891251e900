// The one packed int32 tensor that carries a pattern's arrays; pattern.py has the same arithmetic. No torch header.
#pragma once

#include "problem.h"

namespace block_sparse {

// Every array starts on a 16-byte boundary.
constexpr int64_t packed_length(int64_t elements) { return (elements + 3) / 4 * 4; }

inline int64_t packed_index_size(int64_t grid_rows, int64_t grid_cols, int64_t nnz) {
  return packed_length(grid_rows + 1) + packed_length(grid_cols + 1) + 4 * packed_length(nnz) + packed_length(2 * nnz) +
         packed_length(grid_rows) + packed_length(grid_cols);
}

// The arrays; a packed index on a Hopper GPU has work lists behind them, which the caller adds.
inline PatternIndex unpack_index(const int32_t* packed, const Geometry& geometry) {
  PatternIndex index;
  const auto take = [&packed](int64_t elements) {
    const int32_t* array = packed;
    packed += packed_length(elements);
    return array;
  };
  index.crow_indices = take(geometry.grid_rows() + 1);
  index.col_indices = take(geometry.nnz);
  index.row_slots = take(geometry.nnz);
  index.ccol_indices = take(geometry.grid_cols() + 1);
  index.row_indices = take(geometry.nnz);
  index.col_slots = take(geometry.nnz);
  index.block_coords = take(2 * geometry.nnz);
  index.row_order = take(geometry.grid_rows());
  index.col_order = take(geometry.grid_cols());
  index.work_lists = nullptr;
  return index;
}

}  // namespace block_sparse
