// Blocks to a dense matrix and back: what a densify plan does before or after cuBLAS. No torch header.
//
// Elements are copied bit by bit, so a dtype is its size. Like every launcher (cuda_kernels.h) these enqueue on
// `stream` and return null or a message.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "problem.h"

namespace block_sparse {

// values [nnz, bh, bw] -> dense [O, I], zero where no block is stored. What an edge block holds past O or I is dropped.
const char* launch_scatter_blocks(const Geometry& geometry, const PatternIndex& index, size_t element_size,
                                  const void* values, void* dense, cudaStream_t stream);

// dense [O, I] -> values [nnz, bh, bw], zero past O or I.
const char* launch_gather_blocks(const Geometry& geometry, const PatternIndex& index, size_t element_size,
                                 const void* dense, void* values, cudaStream_t stream);

}  // namespace block_sparse
