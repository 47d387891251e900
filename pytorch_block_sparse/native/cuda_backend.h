// The CUDA back end: what the binding calls. The operands' device is current.
#pragma once

#include "problem.h"

namespace block_sparse::cuda {

// Forward or input gradient, enqueued on the current stream.
void dense_sparse(const DenseSparseProblem& problem);

// Weight gradient, enqueued on the current stream; its workspace comes from PyTorch's caching allocator.
void sparse_support(const SparseSupportProblem& problem);

}  // namespace block_sparse::cuda
