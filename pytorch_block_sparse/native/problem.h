// What a kernel is asked to compute. No torch header: shared by the C++ binding, the CPU kernels and the CUDA
// launchers.
//
//   W [O, I] = [out_features, in_features] is a grid of R x C blocks of [bh, bw]; nnz of them are stored.
//   forward          y  [T, O] = x [T, I] Wᵀ (+ bias)      DenseSparseProblem, Direction::kForward
//   input gradient   dx [T, I] = dy [T, O] W               DenseSparseProblem, Direction::kInputGradient
//   weight gradient  dW [nnz, bh, bw] = dyᵀ x on support   SparseSupportProblem
//   bias gradient    db [O] = sum of dy over tokens        BiasGradProblem
#pragma once

#include <cstdint>
#include <initializer_list>

namespace block_sparse {

enum class DType { kFloat64, kFloat32, kBFloat16, kFloat16 };

enum class Activation { kNone, kRelu, kGelu, kGeluTanh, kSilu };

enum class Direction { kForward, kInputGradient };

struct Geometry {
  int64_t out_features;  // O
  int64_t in_features;   // I
  int64_t block_height;  // bh: side of a block along O
  int64_t block_width;   // bw: side of a block along I
  int64_t nnz;           // stored blocks

  int64_t grid_rows() const { return (out_features + block_height - 1) / block_height; }  // R
  int64_t grid_cols() const { return (in_features + block_width - 1) / block_width; }     // C
};

// The largest piece that both sides of a block are multiples of; 0 where only CUDA's generic kernel serves.
inline int piece_side(const Geometry& geometry) {
  for (int side : {128, 64, 32, 16}) {
    if (geometry.block_height % side == 0 && geometry.block_width % side == 0) return side;
  }
  return 0;
}

// The arrays of a pattern, views of one packed index (packed_index.h). A slot is a block's place in `values`.
struct PatternIndex {
  const int32_t* crow_indices;  // [R + 1]   row r holds entries crow_indices[r] .. crow_indices[r + 1]
  const int32_t* col_indices;   // [nnz]     block column of each entry, ascending within a row
  const int32_t* row_slots;     // [nnz]     slot of each entry
  const int32_t* ccol_indices;  // [C + 1]   the same by columns
  const int32_t* row_indices;   // [nnz]     block row of each entry, ascending within a column
  const int32_t* col_slots;     // [nnz]
  const int32_t* block_coords;  // [nnz, 2]  (block row, block column) of each slot
  const int32_t* row_order;     // [R]       block rows, longest first: the order in which a GPU starts them
  const int32_t* col_order;     // [C]       block columns, longest first
  const int32_t* work_lists;    // of the Hopper kernels (work_list.h), or null
};

// Rows of `input` are `input_stride` elements apart and each is contiguous; every other tensor is contiguous.
struct DenseSparseProblem {
  Direction direction;
  DType dtype;
  Geometry geometry;
  PatternIndex index;
  int64_t tokens;     // T
  const void* input;  // x [T, I], or dy [T, O]
  int64_t input_stride;
  const void* values;     // [nnz, bh, bw]
  const void* bias;       // [O] or null; forward only
  Activation activation;  // applied after the bias; forward only
  void* output;           // y [T, O], or dx [T, I]; every element is written
};

struct SparseSupportProblem {
  DType dtype;
  Geometry geometry;
  PatternIndex index;
  int64_t tokens;               // T
  const void* output_gradient;  // dy [T, O]
  int64_t output_gradient_stride;
  const void* input;  // x [T, I]
  int64_t input_stride;
  DType result_dtype;     // `dtype`, or float32 where that has 16 bits
  bool accumulate;        // adds to what values_gradient holds, nothing past O or I
  void* values_gradient;  // [nnz, bh, bw] in result_dtype; else every element is written, zero past O or I
};

// db [O] = sum of dy over tokens
struct BiasGradProblem {
  DType dtype;
  int64_t tokens;               // T
  int64_t features;             // O
  const void* output_gradient;  // dy [T, O]
  int64_t output_gradient_stride;
  void* bias_gradient;  // [O]
};

}  // namespace block_sparse
