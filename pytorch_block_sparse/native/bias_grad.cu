#include <algorithm>

#include "cuda_kernels.h"
#include "cuda_launch.h"
#include "gemm/column_sums.h"

namespace block_sparse {
namespace {

constexpr int kVectorBytes = 16;

struct BiasGradPlan {
  int64_t splits;  // of the tokens
  int64_t split_tokens;
};

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The same for aligned and for misaligned rows, so that both are added in one order. Blocks are few: with more of them
// the memory serves more rows at a time, and slows down.
BiasGradPlan plan_bias_grad(const BiasGradProblem& problem, const DeviceProperties& device) {
  using Config = ColumnSumsConfig<float, 4>;
  constexpr int64_t kBlocks = 2;  // a multiprocessor
  constexpr int64_t kRowStep = Config::kWarps / Config::kWide;
  constexpr int64_t kLeastTokens = Config::kBatch * kRowStep;
  const int64_t tiles = divide_up(problem.features, 32 * Config::kWide * kVectorBytes / element_size(problem.dtype));
  const int64_t most = divide_up(problem.tokens, kLeastTokens);
  const int64_t splits = std::clamp<int64_t>(kBlocks * device.multiprocessors / tiles, 1, most);
  const int64_t split_tokens = divide_up(divide_up(problem.tokens, splits), kRowStep) * kRowStep;
  return {divide_up(problem.tokens, split_tokens), split_tokens};
}

int64_t partial_columns(const BiasGradProblem& problem) { return divide_up(problem.features, 4) * 4; }

template <class Config>
const char* launch_column_sums(const BiasGradProblem& problem, const BiasGradPlan& plan, float* partials,
                               cudaStream_t stream) {
  const ColumnSumsParams params{
      problem.output_gradient, problem.output_gradient_stride, problem.tokens, problem.features,
      plan.split_tokens,       problem.bias_gradient,          partials,       partial_columns(problem)};
  const int64_t tiles = divide_up(problem.features, 32 * Config::kVector * Config::kWide);
  return launch(column_sums<Config>, dim3(unsigned(tiles), unsigned(plan.splits)), Config::kThreads, 0, stream, params);
}

template <class Element>
const char* launch_element(const BiasGradProblem& problem, const BiasGradPlan& plan, void* workspace,
                           cudaStream_t stream) {
  using Vectors = ColumnSumsConfig<Element, kVectorBytes / sizeof(Element)>;
  using Elements = ColumnSumsConfig<Element, 1>;
  float* partials = plan.splits > 1 ? static_cast<float*>(workspace) : nullptr;
  const bool aligned = rows_aligned(problem.output_gradient, problem.output_gradient_stride, sizeof(Element));
  const char* error = aligned ? launch_column_sums<Vectors>(problem, plan, partials, stream)
                              : launch_column_sums<Elements>(problem, plan, partials, stream);
  if (error != nullptr || partials == nullptr) return error;
  const int64_t blocks = divide_up(problem.features, 4 * kSplitSumsQuads);
  return launch(split_sums<Element>, dim3(unsigned(blocks)), kSplitSumsThreads, 0, stream,
                static_cast<const float*>(partials), int(plan.splits), partial_columns(problem), problem.features,
                static_cast<Element*>(problem.bias_gradient));
}

}  // namespace

size_t bias_grad_workspace(const BiasGradProblem& problem, const DeviceProperties& device) {
  const BiasGradPlan plan = plan_bias_grad(problem, device);
  return plan.splits == 1 ? 0 : plan.splits * partial_columns(problem) * sizeof(float);
}

const char* launch_bias_grad(const BiasGradProblem& problem, void* workspace, const DeviceProperties& device,
                             cudaStream_t stream) {
  const BiasGradPlan plan = plan_bias_grad(problem, device);
  switch (problem.dtype) {
    case DType::kFloat32:
      return launch_element<float>(problem, plan, workspace, stream);
    case DType::kBFloat16:
      return launch_element<cutlass::bfloat16_t>(problem, plan, workspace, stream);
    case DType::kFloat16:
      return launch_element<cutlass::half_t>(problem, plan, workspace, stream);
    default:
      return "block_sparse: the bias gradient is for float32, bfloat16 and float16";
  }
}

}  // namespace block_sparse
