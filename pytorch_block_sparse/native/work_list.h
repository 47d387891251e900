// The work lists of the Hopper kernels, built on the host once a pattern; DevNotes.md describes them. No torch header.
#pragma once

#include "gemm/sm90_work.h"
#include "problem.h"

namespace block_sparse {

namespace sm90 {

// The side of the pieces that the dense x sparse kernels cut a block into: 64, 32 or 16; 0 where none serves.
int dense_sparse_side(const Geometry& geometry);

// Thread blocks that compute a group of lines and share its tokens, 1 or 2; a function of the geometry alone.
int cluster_size(const Geometry& geometry, Direction direction);

// Groups of lines; a function of the geometry alone.
int64_t group_count(const Geometry& geometry, Direction direction);

// The list of one direction within a pattern's lists. Work: the kind that dense_sparse_side and cluster_size ask for.
template <class Work>
Work dense_sparse_work(const Geometry& geometry, Direction direction, const int32_t* work_lists);

}  // namespace sm90

// Length of all lists of a pattern in int32 elements; a function of the geometry alone, so that moving blocks changes
// no size. 0 where no Hopper kernel serves such blocks.
int64_t work_lists_size(const Geometry& geometry);

// The weight gradient's lists within a pattern's lists, the last of them (work_list_back.h).
const int32_t* back_work(const Geometry& geometry, const int32_t* work_lists);

// Builds all lists from the pattern's arrays in host memory. `work_lists`: work_lists_size elements, zeroed.
void build_work_lists(const Geometry& geometry, const PatternIndex& index, int32_t* work_lists);

}  // namespace block_sparse
