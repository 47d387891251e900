// The CUDA launchers: the portable kernels (sm_80 and later) and Hopper's. No torch header.
//
// A launcher enqueues kernels on `stream` of the current device and returns at once: no synchronisation, no allocation,
// safe under CUDA-graph capture. It returns null, or a message in static storage saying what went wrong.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "problem.h"

namespace block_sparse {

enum class Float32Precision { kHighest, kTF32 };  // torch.get_float32_matmul_precision(): "highest"; "high" or "medium"

struct DeviceProperties {
  int multiprocessors;
};

// `line_order`: the block rows (forward) or block columns (input gradient), longest first; device int32 [R] or [C], a
// permutation. Null keeps their own order, which is right unless their lengths differ much.
const char* launch_block_task(const DenseSparseProblem& problem, Float32Precision precision, const int32_t* line_order,
                              cudaStream_t stream);

// The kernel for few tokens (decode_plan.h): whether it takes a problem. Needs 16-byte aligned values.
bool block_task_decode_serves(const DenseSparseProblem& problem);

// Bytes of workspace, 16-byte aligned: a copy of the input where its rows are not 16-byte aligned, else 0.
size_t block_task_decode_workspace(const DenseSparseProblem& problem);
const char* launch_block_task_decode(const DenseSparseProblem& problem, void* workspace, const DeviceProperties& device,
                                     const int32_t* line_order, cudaStream_t stream);

// The Hopper kernel (sm_90a): whether it takes a problem, on a GPU of compute capability 9.0. Needs the pattern's work
// lists, block sides of multiples of 16, 2-byte elements, and 16-byte aligned rows.
bool block_task_sm90_serves(const DenseSparseProblem& problem);

// `workspace`: kBlockTaskSm90Workspace bytes that belong to this launch, 8-byte aligned, with anything in them.
constexpr size_t kBlockTaskSm90Workspace = 8;
const char* launch_block_task_sm90(const DenseSparseProblem& problem, void* workspace, const DeviceProperties& device,
                                   cudaStream_t stream);

// The Hopper weight gradient: whether it takes a problem, on a GPU of compute capability 9.0. Needs the pattern's work
// lists, block sides of multiples of 16, 2-byte elements, and 16-byte aligned rows.
bool block_task_back_sm90_serves(const SparseSupportProblem& problem);

// Bytes of workspace, 256-byte aligned: counters and partial sums of tiles that are cut into token ranges; 0 where none
// can be.
size_t block_task_back_sm90_workspace(const SparseSupportProblem& problem, const DeviceProperties& device);
const char* launch_block_task_back_sm90(const SparseSupportProblem& problem, void* workspace,
                                        const DeviceProperties& device, cudaStream_t stream);

// Bytes that launch_block_task_back wants as workspace; 0 where the stored blocks alone fill the device.
size_t block_task_back_workspace(const SparseSupportProblem& problem, const DeviceProperties& device);

// `workspace`: at least block_task_back_workspace bytes, 16-byte aligned.
const char* launch_block_task_back(const SparseSupportProblem& problem, Float32Precision precision, void* workspace,
                                   const DeviceProperties& device, cudaStream_t stream);

// Column sums, for float32, bfloat16 and float16 and at least one token. `workspace`: bias_grad_workspace bytes,
// 256-byte aligned; 0 where the tokens are not split.
size_t bias_grad_workspace(const BiasGradProblem& problem, const DeviceProperties& device);
const char* launch_bias_grad(const BiasGradProblem& problem, void* workspace, const DeviceProperties& device,
                             cudaStream_t stream);

}  // namespace block_sparse
