// The kernel families behind cuda_kernels.h: one function a .cu, so that each compiles on its own. Host types only.
#pragma once

#include "cuda_kernels.h"
#include "decode_plan.h"

namespace block_sparse {

// How the token dimension of a weight gradient is cut. One split writes the result itself; more write float32 partial
// results [splits, nnz, bh, bw].
struct SplitPlan {
  int splits;
  int64_t split_tokens;
};

using BlockTaskFamily = const char*(const DenseSparseProblem&, const int32_t* line_order, cudaStream_t);
BlockTaskFamily block_task_bfloat16, block_task_float16, block_task_tf32, block_task_3xtf32,
    block_task_3xtf32_two_levels;

// Hopper. `counter`: a word of the device's memory that belongs to the launch, with anything in it.
using BlockTaskSm90Family = const char*(const DenseSparseProblem&, uint64_t* counter, int multiprocessors,
                                        cudaStream_t);
BlockTaskSm90Family block_task_sm90_bfloat16, block_task_sm90_float16;

// Few tokens.
using BlockTaskDecodeFamily = const char*(const DenseSparseProblem&, const DecodePlan&, const int32_t* line_order,
                                          int multiprocessors, cudaStream_t);
BlockTaskDecodeFamily block_task_decode_bfloat16, block_task_decode_float16;

// Where the tiled weight gradient writes: the result itself, or the splits' partial results.
struct BackTarget {
  void* result;
  bool float32;  // else of the operands' type
  bool accumulate;
};

using BlockTaskBackFamily = const char*(const SparseSupportProblem&, const SplitPlan&, const BackTarget&, cudaStream_t);
BlockTaskBackFamily block_task_back_bfloat16, block_task_back_float16, block_task_back_tf32, block_task_back_3xtf32;

// partial [splits, nnz, bh, bw] -> the problem's values_gradient
const char* launch_reduce_splits(const float* partial, const SparseSupportProblem& problem, int splits,
                                 cudaStream_t stream);

// Any block shape and dtype.
const char* launch_generic_block_task(const DenseSparseProblem& problem, cudaStream_t stream);
const char* launch_generic_block_task_back(const SparseSupportProblem& problem, cudaStream_t stream);

}  // namespace block_sparse
