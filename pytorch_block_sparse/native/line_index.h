// The index that dense x sparse walks: block rows forward, block columns for the input gradient.
#pragma once

#include "gemm/index_ring.h"
#include "problem.h"

namespace block_sparse {

inline LineIndex line_index(const PatternIndex& index, bool transposed) {
  return transposed ? LineIndex{index.ccol_indices, index.row_indices, index.col_slots}
                    : LineIndex{index.crow_indices, index.col_indices, index.row_slots};
}

}  // namespace block_sparse
