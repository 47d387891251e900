// The Hopper weight gradient's work list (cutlass/gemm/sm90_back_work.h), built on the host. No torch or CUDA header.
#pragma once

#include <cstdint>

#include "problem.h"

namespace block_sparse {

// int32 elements reserved for the list: a function of the geometry alone, so that rewiring a pattern at fixed nnz keeps
// it. 0 where the geometry is not served (sides that are no multiples of 16, or more than 65535 strips).
int64_t back_work_size(const Geometry& geometry);

// Pieces that the list can hold at most; each tile has one or more.
int64_t back_max_pieces(const Geometry& geometry);

// Writes the list to `work` [back_work_size]; `index` is the host copy of the pattern. Depends on nothing else.
void build_back_work(const Geometry& geometry, const PatternIndex& index, int32_t* work);

}  // namespace block_sparse
