#include "densify_blocks.h"

#include <algorithm>

#include "cuda_launch.h"

namespace block_sparse {
namespace {

constexpr int kThreads = 256;
constexpr int kStripRows = 8;        // rows that a thread copies at once: enough loads in flight to fill the bandwidth
constexpr int kChunkColumns = 1024;  // block columns whose slots a thread block holds
constexpr int64_t kMostBlocks = 1 << 30;  // of a grid

// A strip is up to kStripRows rows within a block row; a thread block copies a strip at a time. Columns and widths are
// counted in vectors of 2 to 16 bytes.
struct BlockCopy {
  const int32_t* crow_indices;  // [R + 1]
  const int32_t* col_indices;   // [nnz]
  const int32_t* row_slots;     // [nnz]
  int32_t grid_cols;            // C
  int32_t block_height;         // bh
  uint32_t block_width;         // bw, in vectors
  int64_t rows;                 // O
  int64_t columns;              // I, in vectors
  int32_t strips_per_row;       // of a block row
  int64_t strips;
};

struct Strip {
  int32_t block_row;
  int32_t first;     // row within the block
  int32_t rows;      // of the blocks
  int64_t row;       // of the dense matrix
  int64_t in_dense;  // those of `rows` that it has; none or less past its edge

  __device__ Strip(const BlockCopy& copy, int64_t number) {
    block_row = int32_t(number / copy.strips_per_row);
    first = int32_t(number % copy.strips_per_row) * kStripRows;
    rows = min(kStripRows, copy.block_height - first);
    row = int64_t(block_row) * copy.block_height + first;
    in_dense = min(int64_t(rows), copy.rows - row);
  }
};

// The first of the ascending columns[begin .. end) that is not below `column`.
__device__ int32_t lower_bound(const int32_t* columns, int32_t begin, int32_t end, int32_t column) {
  while (begin < end) {
    const int32_t middle = begin + (end - begin) / 2;
    if (columns[middle] < column) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// One pass writes blocks and zeros alike: every element of the dense matrix once, in order.
template <class Vector>
__global__ void __launch_bounds__(kThreads)
    scatter_blocks(BlockCopy copy, int32_t chunks, const Vector* __restrict__ values, Vector* __restrict__ dense) {
  __shared__ int32_t slots[kChunkColumns];  // of this strip's block row, -1 where no block is stored
  for (int64_t unit = blockIdx.x; unit < copy.strips * chunks; unit += gridDim.x) {
    const Strip strip(copy, unit / chunks);
    const int32_t first_column = int32_t(unit % chunks) * kChunkColumns;
    const int32_t chunk_columns = min(kChunkColumns, copy.grid_cols - first_column);

    __syncthreads();  // the previous unit's slots have been read
    for (int32_t column = threadIdx.x; column < chunk_columns; column += kThreads) slots[column] = -1;
    __syncthreads();
    const int32_t end = copy.crow_indices[strip.block_row + 1];
    int32_t entry = lower_bound(copy.col_indices, copy.crow_indices[strip.block_row], end, first_column);
    for (entry += threadIdx.x; entry < end; entry += kThreads) {
      const int32_t column = copy.col_indices[entry] - first_column;
      if (column >= chunk_columns) break;
      slots[column] = copy.row_slots[entry];
    }
    __syncthreads();

    const int64_t left = int64_t(first_column) * copy.block_width;
    const uint32_t width = uint32_t(min(int64_t(chunk_columns) * copy.block_width, copy.columns - left));
    Vector* const target_row = dense + strip.row * copy.columns + left;
    for (uint32_t vector = threadIdx.x; vector < width; vector += kThreads) {
      const int32_t slot = slots[vector / copy.block_width];
      const Vector* source =
          values + (int64_t(slot) * copy.block_height + strip.first) * copy.block_width + vector % copy.block_width;
      Vector held[kStripRows];
#pragma unroll
      for (int row = 0; row < kStripRows; ++row) {
        held[row] = slot >= 0 && row < strip.in_dense ? source[int64_t(row) * copy.block_width] : Vector{};
      }
#pragma unroll
      for (int row = 0; row < kStripRows; ++row) {
        if (row < strip.in_dense) target_row[row * copy.columns + vector] = held[row];
      }
    }
  }
}

template <class Vector>
__global__ void __launch_bounds__(kThreads)
    gather_blocks(BlockCopy copy, const Vector* __restrict__ dense, Vector* __restrict__ values) {
  for (int64_t number = blockIdx.x; number < copy.strips; number += gridDim.x) {
    const Strip strip(copy, number);
    const int32_t begin = copy.crow_indices[strip.block_row];
    // At most C bw <= I + bw, so below 2^32.
    const uint32_t width = uint32_t(copy.crow_indices[strip.block_row + 1] - begin) * copy.block_width;
    for (uint32_t vector = threadIdx.x; vector < width; vector += kThreads) {
      const int32_t entry = begin + int32_t(vector / copy.block_width);
      const uint32_t within = vector % copy.block_width;
      const int64_t column = int64_t(copy.col_indices[entry]) * copy.block_width + within;
      const Vector* source = dense + strip.row * copy.columns + column;
      Vector* target =
          values + (int64_t(copy.row_slots[entry]) * copy.block_height + strip.first) * copy.block_width + within;
      Vector held[kStripRows];
#pragma unroll
      for (int row = 0; row < kStripRows; ++row) {
        held[row] = column < copy.columns && row < strip.in_dense ? source[row * copy.columns] : Vector{};
      }
#pragma unroll
      for (int row = 0; row < kStripRows; ++row) {
        if (row < strip.rows) target[int64_t(row) * copy.block_width] = held[row];
      }
    }
  }
}

// Bytes of the widest vector in which rows of blocks and of the dense matrix, and both tensors, are whole.
size_t vector_bytes(const Geometry& geometry, size_t element_size, const void* values, const void* dense) {
  const uint64_t together = geometry.block_width * element_size | geometry.in_features * element_size |
                            reinterpret_cast<uintptr_t>(values) | reinterpret_cast<uintptr_t>(dense);
  return std::min<uint64_t>(together & ~(together - 1), 16);
}

// Calls `run` with a value of the vector type.
template <class Run>
const char* with_vector(size_t bytes, Run run) {
  switch (bytes) {
    case 16:
      return run(uint4{});
    case 8:
      return run(uint2{});
    case 4:
      return run(uint32_t{});
    case 2:
      return run(uint16_t{});
    default:
      return "block_sparse: an operand is not aligned to its elements";
  }
}

BlockCopy block_copy(const Geometry& geometry, const PatternIndex& index, int64_t vector_elements) {
  BlockCopy copy{};
  copy.crow_indices = index.crow_indices;
  copy.col_indices = index.col_indices;
  copy.row_slots = index.row_slots;
  copy.grid_cols = int32_t(geometry.grid_cols());
  copy.block_height = int32_t(geometry.block_height);
  copy.block_width = uint32_t(geometry.block_width / vector_elements);
  copy.rows = geometry.out_features;
  copy.columns = geometry.in_features / vector_elements;
  copy.strips_per_row = int32_t((geometry.block_height + kStripRows - 1) / kStripRows);
  copy.strips = geometry.grid_rows() * copy.strips_per_row;
  return copy;
}

}  // namespace

const char* launch_scatter_blocks(const Geometry& geometry, const PatternIndex& index, size_t element_size,
                                  const void* values, void* dense, cudaStream_t stream) {
  const size_t bytes = vector_bytes(geometry, element_size, values, dense);
  const BlockCopy copy = block_copy(geometry, index, int64_t(bytes / element_size));
  const int32_t chunks = int32_t((geometry.grid_cols() + kChunkColumns - 1) / kChunkColumns);
  const dim3 grid(unsigned(std::min(copy.strips * chunks, kMostBlocks)));
  return with_vector(bytes, [&](auto vector) {
    using Vector = decltype(vector);
    return launch(scatter_blocks<Vector>, grid, kThreads, 0, stream, copy, chunks, static_cast<const Vector*>(values),
                  static_cast<Vector*>(dense));
  });
}

const char* launch_gather_blocks(const Geometry& geometry, const PatternIndex& index, size_t element_size,
                                 const void* dense, void* values, cudaStream_t stream) {
  const size_t bytes = vector_bytes(geometry, element_size, values, dense);
  const BlockCopy copy = block_copy(geometry, index, int64_t(bytes / element_size));
  const dim3 grid(unsigned(std::min(copy.strips, kMostBlocks)));
  return with_vector(bytes, [&](auto vector) {
    using Vector = decltype(vector);
    return launch(gather_blocks<Vector>, grid, kThreads, 0, stream, copy, static_cast<const Vector*>(dense),
                  static_cast<Vector*>(values));
  });
}

}  // namespace block_sparse
