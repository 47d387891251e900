// The work lists of the Hopper kernels, built on the host once a pattern; DevNotes.md describes them. No torch header.
#pragma once

#include "problem.h"

namespace block_sparse {

namespace sm90 {

// Blocks whose sides are multiples of 64 have lists for the dense x sparse kernel.
bool has_dense_sparse_work(const Geometry& geometry);

// Groups of two lines of 64 outputs.
int64_t group_count(const Geometry& geometry, Direction direction);

}  // namespace sm90

// Length of all lists of a pattern in int32 elements; a function of the geometry alone, so that moving blocks changes
// no size. 0 where no Hopper kernel serves such blocks.
int64_t work_lists_size(const Geometry& geometry);

// Where an operator's list begins, in elements from the first; the lists of both directions of dense x sparse.
int64_t dense_sparse_work_offset(const Geometry& geometry, Direction direction);

// Builds all lists from the pattern's arrays in host memory. `work`: work_lists_size elements, zeroed.
void build_work_lists(const Geometry& geometry, const PatternIndex& index, int32_t* work);

}  // namespace block_sparse
