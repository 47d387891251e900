// The CUDA back end: what the binding calls. The operands' device is current.
#pragma once

#include "problem.h"

namespace block_sparse::cuda {

// Forward or input gradient, enqueued on the current stream.
void dense_sparse(const DenseSparseProblem& problem);

// Weight gradient, enqueued on the current stream; its workspace comes from PyTorch's caching allocator.
void sparse_support(const SparseSupportProblem& problem);

// Bias gradient of float32, bfloat16 or float16 and at least one token, enqueued on the current stream.
void bias_grad(const BiasGradProblem& problem);

// Whether the Hopper kernels may run: on compute capability 9.0, unless BLOCK_SPARSE_CUDA_PATH=sm80 keeps to the
// portable ones (for comparisons; read once a process).
bool hopper_path();

}  // namespace block_sparse::cuda
