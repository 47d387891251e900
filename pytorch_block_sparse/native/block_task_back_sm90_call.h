// Between the Hopper weight gradient's launcher and its kernels. No CuTe header: compiled by the host
// compiler.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "gemm/sm90_back_work.h"
#include "problem.h"

namespace block_sparse {

// Below this many tokens no tile is cut: neither partial sums nor counters are needed.
constexpr int64_t kBackMinSplitTokens = 1024;

constexpr int kBackTicketBits = 56;  // of a counter (sm90_back_partial.h)

struct BackSm90Plan {
  int thread_blocks;
  size_t counter_bytes;   // a multiple of 256; 0: no tile is cut
  size_t progress_bytes;  // likewise; 0: thread blocks need not wait for each other
  size_t partial_bytes;
  int window;  // how far they may be apart, in tokens
};

struct BackSm90Call {
  const SparseSupportProblem& problem;
  BackSm90Plan plan;
  const int32_t* work;
  void* workspace;
  uint64_t ticket;  // tells this launch's counters from whatever the workspace held before
  cudaStream_t stream;
};

// One a .cu, because each takes a minute to compile: results of the operands' type or float32; paced or not.
using BackSm90Family = const char*(const BackSm90Call&);
BackSm90Family block_task_back_sm90_bfloat16, block_task_back_sm90_bfloat16_float32,
    block_task_back_sm90_bfloat16_paced, block_task_back_sm90_bfloat16_float32_paced;
BackSm90Family block_task_back_sm90_float16, block_task_back_sm90_float16_float32, block_task_back_sm90_float16_paced,
    block_task_back_sm90_float16_float32_paced;

}  // namespace block_sparse
