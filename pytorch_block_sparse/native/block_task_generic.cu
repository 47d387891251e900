#include "cuda_families.h"
#include "cuda_launch.h"
#include "gemm/block_task_back.h"
#include "gemm/block_task_generic.h"

namespace block_sparse {
namespace {

constexpr int kThreads = 256;

// Calls `run` with a value of the dtype's element type.
template <class Run>
const char* with_element(DType dtype, Run run) {
  switch (dtype) {
    case DType::kFloat64:
      return run(double{});
    case DType::kFloat32:
      return run(float{});
    case DType::kBFloat16:
      return run(cutlass::bfloat16_t{});
    default:
      return run(cutlass::half_t{});
  }
}

template <class Element>
const char* generic_block_task_launch(const DenseSparseProblem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  bool transposed = problem.direction == Direction::kInputGradient;
  GenericTaskParams<Element> params{};
  params.index = transposed ? LineIndex{problem.index.ccol_indices, problem.index.row_indices, problem.index.col_slots}
                            : LineIndex{problem.index.crow_indices, problem.index.col_indices, problem.index.row_slots};
  params.block_height = int(geometry.block_height);
  params.block_width = int(geometry.block_width);
  params.tokens = problem.tokens;
  params.extent_n = transposed ? geometry.in_features : geometry.out_features;
  params.extent_k = transposed ? geometry.out_features : geometry.in_features;
  params.input = static_cast<const Element*>(problem.input);
  params.input_stride = problem.input_stride;
  params.values = static_cast<const Element*>(problem.values);
  params.bias = static_cast<const Element*>(problem.bias);
  params.output = static_cast<Element*>(problem.output);
  params.activation = EpilogueActivation(int(problem.activation));
  auto kernel = transposed ? generic_block_task<Element, true> : generic_block_task<Element, false>;
  return launch(kernel, dim3(unsigned(grid_stride_blocks(params.tokens * params.extent_n, kThreads))), kThreads, 0,
                stream, params);
}

template <class Element, class Output>
const char* generic_block_task_back_launch(const SparseSupportProblem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  GenericTaskBackParams<Element> params{};
  params.block_coords = problem.index.block_coords;
  params.block_height = int(geometry.block_height);
  params.block_width = int(geometry.block_width);
  params.nnz = geometry.nnz;
  params.tokens = problem.tokens;
  params.out_features = geometry.out_features;
  params.in_features = geometry.in_features;
  params.output_gradient = static_cast<const Element*>(problem.output_gradient);
  params.output_gradient_stride = problem.output_gradient_stride;
  params.input = static_cast<const Element*>(problem.input);
  params.input_stride = problem.input_stride;
  params.accumulate = problem.accumulate;
  int64_t elements = geometry.nnz * geometry.block_height * geometry.block_width;
  return launch(generic_block_task_back<Element, Output>, dim3(unsigned(grid_stride_blocks(elements, kThreads))),
                kThreads, 0, stream, params, static_cast<Output*>(problem.values_gradient));
}

}  // namespace

const char* launch_generic_block_task(const DenseSparseProblem& problem, cudaStream_t stream) {
  return with_element(problem.dtype,
                      [&](auto element) { return generic_block_task_launch<decltype(element)>(problem, stream); });
}

const char* launch_generic_block_task_back(const SparseSupportProblem& problem, cudaStream_t stream) {
  return with_element(problem.dtype, [&](auto element) {
    using Element = decltype(element);
    if (problem.result_dtype == problem.dtype) return generic_block_task_back_launch<Element, Element>(problem, stream);
    return generic_block_task_back_launch<Element, float>(problem, stream);
  });
}

const char* launch_reduce_splits(const float* partial, const SparseSupportProblem& problem, int splits,
                                 cudaStream_t stream) {
  const int64_t elements = problem.geometry.nnz * problem.geometry.block_height * problem.geometry.block_width;
  return with_element(problem.result_dtype, [&](auto output) {
    return launch(reduce_splits<decltype(output)>, dim3(unsigned(grid_stride_blocks(elements, kThreads))), kThreads, 0,
                  stream, partial, static_cast<decltype(output)*>(problem.values_gradient), elements, splits,
                  problem.accumulate);
  });
}

}  // namespace block_sparse
