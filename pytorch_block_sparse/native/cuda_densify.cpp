#include "cuda_densify.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>

#include <atomic>
#include <cstdlib>

#include "cuda_check.h"
#include "densify_blocks.h"

namespace block_sparse::cuda {
namespace {

using at::Tensor;

at::TensorOptions tensor_options(DType dtype) {
  const auto scalar_type = [dtype] {
    switch (dtype) {
      case DType::kFloat64:
        return at::kDouble;
      case DType::kFloat32:
        return at::kFloat;
      case DType::kBFloat16:
        return at::kBFloat16;
      default:
        return at::kHalf;
    }
  };
  return at::TensorOptions(scalar_type()).device(at::kCUDA, at::cuda::current_device());
}

// A tensor over memory of an operand, which the caller keeps alive.
Tensor view(const void* data, at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options) {
  return at::for_blob(const_cast<void*>(data), sizes)
      .strides(strides)
      .target_device(options.device())
      .options(options)
      .make_tensor();
}

// [rows, features], rows `stride` elements apart.
Tensor rows_view(const void* data, int64_t rows, int64_t features, int64_t stride, const at::TensorOptions& options) {
  return view(data, {rows, features}, {stride, 1}, options);
}

void activate_(Tensor& y, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      at::relu_(y);
      return;
    case Activation::kGelu:
      at::gelu_(y);
      return;
    case Activation::kGeluTanh:
      at::gelu_(y, "tanh");
      return;
    case Activation::kSilu:
      at::silu_(y);
      return;
  }
}

// Calls `run` with an uninitialised dense matrix [O, I], unless there is no memory for it.
template <class Run>
bool with_dense_temporary(const Geometry& geometry, const at::TensorOptions& options, Run run) {
  static std::atomic<int64_t> least_refused{INT64_MAX};
  const int64_t elements = geometry.out_features * geometry.in_features;
  const int64_t bytes = elements * int64_t(options.dtype().itemsize());
  if (bytes >= least_refused.load(std::memory_order_relaxed)) return false;
  try {
    run(at::empty({geometry.out_features, geometry.in_features}, options));
    return true;
  } catch (const c10::OutOfMemoryError&) {
    least_refused.store(bytes, std::memory_order_relaxed);
    return false;
  }
}

}  // namespace

bool may_call_dense() {
  static const bool configured = std::getenv("CUBLAS_WORKSPACE_CONFIG") != nullptr;
  return configured || !at::globalContext().deterministicAlgorithms();
}

bool densify(const DenseSparseProblem& problem) {
  const Geometry& geometry = problem.geometry;
  const at::TensorOptions options = tensor_options(problem.dtype);
  return with_dense_temporary(geometry, options, [&](const Tensor& weight) {
    check_launch(launch_scatter_blocks(geometry, problem.index, weight.element_size(), problem.values,
                                       weight.mutable_data_ptr(), at::cuda::getCurrentCUDAStream()));
    const bool forward = problem.direction == Direction::kForward;
    const int64_t inner = forward ? geometry.in_features : geometry.out_features;
    const int64_t outer = forward ? geometry.out_features : geometry.in_features;
    const Tensor input = rows_view(problem.input, problem.tokens, inner, problem.input_stride, options);
    Tensor output = rows_view(problem.output, problem.tokens, outer, outer, options);
    if (problem.bias) {
      at::addmm_out(output, view(problem.bias, {outer}, {1}, options), input, weight.t());
    } else {
      at::mm_out(output, input, forward ? weight.t() : weight);
    }
    activate_(output, problem.activation);
  });
}

bool densify(const SparseSupportProblem& problem) {
  const Geometry& geometry = problem.geometry;
  const at::TensorOptions options = tensor_options(problem.dtype);
  return with_dense_temporary(geometry, options, [&](Tensor gradient) {
    const Tensor dy = rows_view(problem.output_gradient, problem.tokens, geometry.out_features,
                                problem.output_gradient_stride, options);
    const Tensor x = rows_view(problem.input, problem.tokens, geometry.in_features, problem.input_stride, options);
    at::mm_out(gradient, dy.t(), x);
    check_launch(launch_gather_blocks(geometry, problem.index, gradient.element_size(), gradient.const_data_ptr(),
                                      problem.values_gradient, at::cuda::getCurrentCUDAStream()));
  });
}

}  // namespace block_sparse::cuda
