// The three operators for any block shape and float64: one thread an output element, plain loops over the index. Slow,
// small, and free of alignment or shape conditions; what the tiled kernels do not cover runs here.
#pragma once

#include "gemm/epilogue_function.h"
#include "gemm/index_ring.h"

namespace block_sparse {

template <class Element>
using GenericSum = cute::conditional_t<std::is_same_v<Element, double>, double, float>;

template <class Element>
struct GenericTaskParams {
  LineIndex index;
  int block_height;      // bh
  int block_width;       // bw
  int64_t tokens;        // T
  int64_t extent_n;      // O (forward) or I
  int64_t extent_k;      // I (forward) or O
  const Element* input;  // [T, extent_k]
  int64_t input_stride;
  const Element* values;  // [nnz, bh, bw]
  const Element* bias;    // [extent_n] or null
  Element* output;        // [T, extent_n]
  EpilogueActivation activation;
};

template <class Element, bool kTransposed>
__global__ void __launch_bounds__(256) generic_block_task(const __grid_constant__ GenericTaskParams<Element> params) {
  using Sum = GenericSum<Element>;
  const int block_n = kTransposed ? params.block_width : params.block_height;
  const int block_k = kTransposed ? params.block_height : params.block_width;
  const int64_t stride_n = kTransposed ? 1 : params.block_width;
  const int64_t stride_k = kTransposed ? params.block_width : 1;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < params.tokens * params.extent_n; i += step) {
    int64_t token = i / params.extent_n;
    int64_t n = i % params.extent_n;
    int64_t line = n / block_n;
    const Element* row = params.input + token * params.input_stride;  // [extent_k]
    Sum sum = 0;
    for (int entry = params.index.offsets[line]; entry < params.index.offsets[line + 1]; ++entry) {
      const Element* block = params.values +
                             int64_t(params.index.slots[entry]) * params.block_height * params.block_width +
                             n % block_n * stride_n;
      int64_t first = int64_t(params.index.positions[entry]) * block_k;
      int64_t inner = min(int64_t(block_k), params.extent_k - first);
      for (int64_t k = 0; k < inner; ++k) sum += Sum(row[first + k]) * Sum(block[k * stride_k]);
    }
    if (params.bias != nullptr) sum += Sum(params.bias[n]);
    params.output[i] = Element(activate(sum, params.activation));
  }
}

template <class Element>
struct GenericTaskBackParams {
  const int32_t* block_coords;  // [nnz, 2]
  int block_height;             // bh
  int block_width;              // bw
  int64_t nnz;
  int64_t tokens;                  // T
  int64_t out_features;            // O
  int64_t in_features;             // I
  const Element* output_gradient;  // dy [T, O]
  int64_t output_gradient_stride;
  const Element* input;  // x [T, I]
  int64_t input_stride;
  bool accumulate;  // adds to the result
};

template <class Element, class Output>
__global__ void __launch_bounds__(256)
    generic_block_task_back(const __grid_constant__ GenericTaskBackParams<Element> params,
                            Output* result) {  // [nnz, bh, bw]
  using Sum = GenericSum<Element>;
  const int64_t block_elements = int64_t(params.block_height) * params.block_width;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < params.nnz * block_elements; i += step) {
    int64_t slot = i / block_elements;
    int64_t in_block = i % block_elements;
    int64_t m = int64_t(params.block_coords[2 * slot]) * params.block_height + in_block / params.block_width;
    int64_t n = int64_t(params.block_coords[2 * slot + 1]) * params.block_width + in_block % params.block_width;
    Sum sum = 0;
    if (m < params.out_features && n < params.in_features) {
      for (int64_t token = 0; token < params.tokens; ++token) {
        sum += Sum(params.output_gradient[token * params.output_gradient_stride + m]) *
               Sum(params.input[token * params.input_stride + n]);
      }
    }
    if (params.accumulate) sum += Sum(result[i]);
    result[i] = Output(sum);
  }
}

}  // namespace block_sparse
