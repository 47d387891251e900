// TMA descriptors (tensor maps), encoded on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "problem.h"

namespace block_sparse {

// A matrix [rows, columns] of 16-bit elements, rows `stride` elements apart, read in boxes of [box_rows, box_columns].
// A box row is 32, 64 or 128 bytes and lies in shared memory in the swizzle of that width. What is outside reads as
// zero, and is not written. Base and stride in bytes must be multiples of 16.
struct TensorMapShape {
  DType dtype;
  const void* base;
  int64_t rows;
  int64_t columns;
  int64_t stride;
  int box_rows;
  int box_columns;
  CUtensorMapL2promotion promotion;  // bytes that a miss brings into L2
};

// Null, or what went wrong.
const char* encode_tensor_map(const TensorMapShape& shape, CUtensorMap* map);

}  // namespace block_sparse
