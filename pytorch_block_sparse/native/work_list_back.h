// The Hopper weight gradient's work lists (cutlass/gemm/sm90_back_work.h), built on the host. No torch or CUDA header.
#pragma once

#include <cstdint>

#include "problem.h"

namespace block_sparse {

// Up to so many tokens a pattern of few pieces has a list of its own: what counts then is how soon a tile is done.
constexpr int64_t kBackFewTokens = 4096;

// int32 elements reserved for the lists: a function of the geometry alone, so that rewiring a pattern at fixed nnz
// keeps it. 0 where the geometry is not served (sides that are no multiples of 16, or more than 65535 strips).
int64_t back_work_size(const Geometry& geometry);

// Where in `work` the list for so many tokens begins.
const int32_t* back_list(const Geometry& geometry, const int32_t* work, int64_t tokens);

// Pieces that a list can hold at most; each tile has one or more.
int64_t back_max_pieces(const Geometry& geometry);

// Writes the lists to `work` [back_work_size]; `index` is the host copy of the pattern. Depends on nothing else.
void build_back_work(const Geometry& geometry, const PatternIndex& index, int32_t* work);

}  // namespace block_sparse
