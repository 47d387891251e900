// From a problem to the kernel family that serves it. Host only.
#include "cuda_kernels.h"

#include <algorithm>

#include "cuda_families.h"
#include "cuda_launch.h"
#include "cuda_tiles.h"
#include "work_list.h"

namespace block_sparse {
namespace {

bool is_tiled(DType dtype, const Geometry& geometry) { return dtype != DType::kFloat64 && piece_side(geometry) != 0; }

// Of a token, that a product sums over.
int64_t inner_features(const DenseSparseProblem& problem) {
  return problem.direction == Direction::kForward ? problem.geometry.in_features : problem.geometry.out_features;
}

// Sums of very few products do not average out what 3xTF32 drops (2^-22 of a product): those run in plain float32.
bool is_back_tiled(const SparseSupportProblem& problem, Float32Precision precision) {
  constexpr int64_t kLeastTripleTF32Tokens = 16;
  bool triple = problem.dtype == DType::kFloat32 && precision == Float32Precision::kHighest;
  return is_tiled(problem.dtype, problem.geometry) && !(triple && problem.tokens < kLeastTripleTF32Tokens);
}

// Where outputs are few, cuBLAS splits long sums over thread blocks and so rounds less; two levels keep up with it, and
// their smaller tiles fill the GPU better. Where outputs are many, cuBLAS adds in one chain, longer than that of
// 3xTF32.
bool sums_in_two_levels(const DenseSparseProblem& problem) {
  constexpr int64_t kFewOutputs = 1 << 23;  // two waves of large tiles on the H200
  const Geometry& geometry = problem.geometry;
  return problem.tokens * (problem.direction == Direction::kForward ? geometry.out_features : geometry.in_features) <=
         kFewOutputs;
}

// A split costs a write and a read of float32 partial results; it pays where the tiles of whole token ranges leave
// multiprocessors idle, in particular in their last wave.
SplitPlan plan_splits(const SparseSupportProblem& problem, const DeviceProperties& device) {
  constexpr int64_t kAlignment = 64;     // tokens: a multiple of every stage
  constexpr int64_t kLeastTokens = 256;  // below, filling the pipeline costs as much as the work
  constexpr int kMostSplits = 32;
  constexpr int64_t kLargestSweptSide = 16;
  constexpr int64_t kSweepBytes = 20 << 20;  // of x, that small blocks' thread blocks may be apart and still meet in L2
  constexpr double kMultiprocessorRate = 2.6e12;  // flop/s (H200, bfloat16)
  constexpr double kMemoryRate = 3.5e12;          // byte/s
  constexpr double kReductionLaunch = 4e-6;       // s

  const Geometry& geometry = problem.geometry;
  const int64_t side = piece_side(geometry);
  const int64_t group = piece_group(int(side));
  const int64_t pieces = geometry.nnz * (geometry.block_height / side) * (geometry.block_width / side);
  const int64_t rows = std::min(geometry.grid_rows() * (geometry.block_height / side), pieces);
  const int64_t tiles =
      std::max(std::min(pieces, pieces / group + rows / 2), int64_t(1));  // rows fill their last tile by half
  const int64_t resident = int64_t(resident_blocks(int(side))) * device.multiprocessors;
  const double tile_seconds =
      2.0 * side * side * group * problem.tokens * resident_blocks(int(side)) / kMultiprocessorRate;
  const double partial_bytes = 4.0 * geometry.nnz * geometry.block_height * geometry.block_width;

  auto seconds_with = [&](int splits) {
    double waves = double((tiles * splits + resident - 1) / resident);
    double reduction = splits == 1 ? 0 : 2 * splits * partial_bytes / kMemoryRate + kReductionLaunch;
    return waves * tile_seconds / splits + reduction;
  };
  // Small blocks read the same tokens from so many thread blocks that x must come from L2. The splits run one after the
  // other, which keeps all of them within one token range.
  const int64_t element_size = problem.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t input_bytes = problem.tokens * geometry.in_features * element_size;
  int best = side > kLargestSweptSide ? 1 : int(std::min((input_bytes + kSweepBytes - 1) / kSweepBytes, int64_t(8)));
  best = std::max(best, 1);
  for (int splits = best + 1; splits <= kMostSplits && problem.tokens / splits >= kLeastTokens; ++splits) {
    if (seconds_with(splits) < 0.95 * seconds_with(best)) best = splits;
  }
  int64_t tokens = (problem.tokens + best - 1) / best;
  tokens = std::max((tokens + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
  return {std::max(int((problem.tokens + tokens - 1) / tokens), 1), tokens};
}

}  // namespace

const char* launch_block_task(const DenseSparseProblem& problem, Float32Precision precision, const int32_t* line_order,
                              cudaStream_t stream) {
  if (problem.tokens == 0) return nullptr;
  if (!is_tiled(problem.dtype, problem.geometry)) return launch_generic_block_task(problem, stream);
  switch (problem.dtype) {
    case DType::kBFloat16:
      return block_task_bfloat16(problem, line_order, stream);
    case DType::kFloat16:
      return block_task_float16(problem, line_order, stream);
    default:
      return precision == Float32Precision::kTF32 ? block_task_tf32(problem, line_order, stream)
             : sums_in_two_levels(problem)        ? block_task_3xtf32_two_levels(problem, line_order, stream)
                                                  : block_task_3xtf32(problem, line_order, stream);
  }
}

bool block_task_decode_serves(const DenseSparseProblem& problem) {
  return decode_serves(problem.direction, problem.dtype, problem.geometry, problem.tokens) &&
         is_aligned(problem.values) &&
         (block_task_decode_workspace(problem) == 0 || problem.input_stride >= inner_features(problem));
}

size_t block_task_decode_workspace(const DenseSparseProblem& problem) {
  constexpr size_t kElementSize = 2;
  const bool aligned = rows_aligned(problem.input, problem.input_stride, kElementSize);
  return aligned ? 0 : kElementSize * problem.tokens * inner_features(problem);
}

const char* launch_block_task_decode(const DenseSparseProblem& problem, void* workspace, const DeviceProperties& device,
                                     const int32_t* line_order, cudaStream_t stream) {
  DenseSparseProblem aligned = problem;
  if (block_task_decode_workspace(problem) > 0) {
    constexpr size_t kElementSize = 2;
    aligned.input = workspace;
    aligned.input_stride = inner_features(problem);
    const size_t row = kElementSize * aligned.input_stride;
    const cudaError_t status = cudaMemcpy2DAsync(workspace, row, problem.input, kElementSize * problem.input_stride,
                                                 row, problem.tokens, cudaMemcpyDeviceToDevice, stream);
    if (status != cudaSuccess) return status_message(status);
  }
  const DecodePlan plan = plan_decode(problem.direction, problem.geometry, problem.tokens, device.multiprocessors);
  auto* family = problem.dtype == DType::kBFloat16 ? block_task_decode_bfloat16 : block_task_decode_float16;
  return family(aligned, plan, line_order, device.multiprocessors, stream);
}

bool block_task_sm90_serves(const DenseSparseProblem& problem) {
#ifdef BLOCK_SPARSE_WITH_SM90A
  const Geometry& geometry = problem.geometry;
  const bool forward = problem.direction == Direction::kForward;
  const int64_t inner = forward ? geometry.in_features : geometry.out_features;
  const int64_t features = forward ? geometry.out_features : geometry.in_features;
  const int64_t inner_block = forward ? geometry.block_width : geometry.block_height;
  constexpr size_t kElementSize = 2;
  return (problem.dtype == DType::kBFloat16 || problem.dtype == DType::kFloat16) && problem.index.work_lists &&
         geometry.nnz > 0 && problem.tokens > 0 &&
         inner % inner_block == 0 &&  // else x must be zero *and* the blocks finite past the edge
         sm90::dense_sparse_side(geometry) != 0 && is_aligned(problem.values) &&
         rows_aligned(problem.input, problem.input_stride, kElementSize) &&
         rows_aligned(problem.output, features, kElementSize);
#else
  return false;
#endif
}

const char* launch_block_task_sm90(const DenseSparseProblem& problem, void* workspace, const DeviceProperties& device,
                                   cudaStream_t stream) {
#ifdef BLOCK_SPARSE_WITH_SM90A
  auto* family = problem.dtype == DType::kBFloat16 ? block_task_sm90_bfloat16 : block_task_sm90_float16;
  return family(problem, static_cast<uint64_t*>(workspace), device.multiprocessors, stream);
#else
  return "block_sparse: built without the Hopper kernels";
#endif
}

#ifndef BLOCK_SPARSE_WITH_SM90A
bool block_task_back_sm90_serves(const SparseSupportProblem&) { return false; }
size_t block_task_back_sm90_workspace(const SparseSupportProblem&, const DeviceProperties&) { return 0; }
const char* launch_block_task_back_sm90(const SparseSupportProblem&, void*, const DeviceProperties&, cudaStream_t) {
  return "block_sparse: built without the Hopper kernels";
}
#endif

size_t block_task_back_workspace(const SparseSupportProblem& problem, const DeviceProperties& device) {
  if (problem.geometry.nnz == 0 || !is_tiled(problem.dtype, problem.geometry)) return 0;
  SplitPlan plan = plan_splits(problem, device);
  if (plan.splits == 1) return 0;
  return sizeof(float) * plan.splits * problem.geometry.nnz * problem.geometry.block_height *
         problem.geometry.block_width;
}

const char* launch_block_task_back(const SparseSupportProblem& problem, Float32Precision precision, void* workspace,
                                   const DeviceProperties& device, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  if (geometry.nnz == 0) return nullptr;
  if (!is_back_tiled(problem, precision)) return launch_generic_block_task_back(problem, stream);

  BlockTaskBackFamily* family = problem.dtype == DType::kBFloat16      ? block_task_back_bfloat16
                                : problem.dtype == DType::kFloat16     ? block_task_back_float16
                                : precision == Float32Precision::kTF32 ? block_task_back_tf32
                                                                       : block_task_back_3xtf32;
  SplitPlan plan = plan_splits(problem, device);
  if (plan.splits == 1) {
    return family(problem, plan, {problem.values_gradient, problem.result_dtype == DType::kFloat32, problem.accumulate},
                  stream);
  }
  if (const char* error = family(problem, plan, {workspace, true, false}, stream)) return error;
  return launch_reduce_splits(static_cast<const float*>(workspace), problem, plan.splits, stream);
}

}  // namespace block_sparse
