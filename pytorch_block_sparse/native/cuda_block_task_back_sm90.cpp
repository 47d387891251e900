// The host side of the Hopper weight gradient, declared in cuda_kernels.h.
#include <algorithm>

#include "block_task_back_sm90_call.h"
#include "cuda_kernels.h"
#include "cuda_launch.h"
#include "cuda_launch_ticket.h"
#include "work_list.h"
#include "work_list_back.h"

namespace block_sparse {
namespace {

// Over a long sweep thread blocks would drift further apart than the tokens of which L2 holds all strips; from so many
// bytes of both operands on they are held within a window. Blocks of 128 share less through L2, and lose by it.
constexpr int64_t kMinPacedBytes = int64_t(5) << 28;
constexpr int64_t kPaceWindowBytes = int64_t(64) << 20;

// What the launch needs, by upper bounds: the list's counts are known to the kernel alone.
BackSm90Plan plan_back_sm90(const SparseSupportProblem& problem, const DeviceProperties& device) {
  const int64_t pieces = back_max_pieces(problem.geometry);
  const bool may_split = problem.tokens >= kBackMinSplitTokens;
  const int64_t items = std::min<int64_t>(device.multiprocessors, may_split ? pieces * kBackMaxSplits : pieces);
  BackSm90Plan plan{};
  plan.thread_blocks = int(items);
  if (may_split) {
    const int quads = int(std::min<int64_t>(kBackMaxQuads, pieces));
    plan.counter_bytes = (size_t(items) * kBackWarpgroups * sizeof(uint64_t) + 255) / 256 * 256;
    plan.partial_bytes = size_t(items) * kBackWarpgroups * size_t(back_partial_floats(quads)) * sizeof(float);
  }
  const Geometry& geometry = problem.geometry;
  const int64_t token_bytes = 2 * (geometry.in_features + geometry.out_features);
  if (problem.tokens * token_bytes >= kMinPacedBytes && items >= kBackPaceBlocks &&
      std::min(geometry.block_height, geometry.block_width) < 128) {
    plan.progress_bytes = kBackPaceBlocks * sizeof(uint32_t);
    plan.window = int(kPaceWindowBytes / token_bytes);
  }
  return plan;
}

bool rows_serve_tma(const void* base, int64_t stride) {
  return rows_aligned(base, stride, 2) && stride < (int64_t(1) << 39);
}

}  // namespace

bool block_task_back_sm90_serves(const SparseSupportProblem& problem) {
  const Geometry& geometry = problem.geometry;
  // Past an edge the copy engine reads zeros, which times a NaN of the other operand is no zero.
  const bool ragged =
      geometry.out_features % geometry.block_height != 0 || geometry.in_features % geometry.block_width != 0;
  return (problem.dtype == DType::kBFloat16 || problem.dtype == DType::kFloat16) && !ragged && problem.tokens > 0 &&
         problem.index.work_lists && geometry.nnz > 0 && problem.tokens < INT32_MAX - 64 &&
         back_work_size(geometry) > 0 && rows_serve_tma(problem.input, problem.input_stride) &&
         rows_serve_tma(problem.output_gradient, problem.output_gradient_stride) && is_aligned(problem.values_gradient);
}

size_t block_task_back_sm90_workspace(const SparseSupportProblem& problem, const DeviceProperties& device) {
  const BackSm90Plan plan = plan_back_sm90(problem, device);
  return plan.counter_bytes + plan.progress_bytes + plan.partial_bytes;
}

const char* launch_block_task_back_sm90(const SparseSupportProblem& problem, void* workspace,
                                        const DeviceProperties& device, cudaStream_t stream) {
  if (!block_task_back_sm90_serves(problem))
    return "block_sparse: the Hopper weight gradient does not serve this problem";
  const Geometry& geometry = problem.geometry;
  const int32_t* work = back_list(geometry, back_work(geometry, problem.index.work_lists), problem.tokens);
  const uint64_t ticket = next_ticket(kBackTicketBits);
  const BackSm90Call call{problem, plan_back_sm90(problem, device), work, workspace, ticket, stream};
  const bool paced = call.plan.progress_bytes > 0;
  const bool float32 = problem.result_dtype == DType::kFloat32;
  static constexpr BackSm90Family* kFamilies[2][2][2] = {
      {{block_task_back_sm90_bfloat16, block_task_back_sm90_bfloat16_paced},
       {block_task_back_sm90_bfloat16_float32, block_task_back_sm90_bfloat16_float32_paced}},
      {{block_task_back_sm90_float16, block_task_back_sm90_float16_paced},
       {block_task_back_sm90_float16_float32, block_task_back_sm90_float16_float32_paced}},
  };
  return kFamilies[problem.dtype == DType::kFloat16][float32][paced](call);
}

}  // namespace block_sparse
