// Carries out a densify plan: scattering or gathering around PyTorch's dense product, on the current stream and device.
#pragma once

#include "problem.h"

namespace block_sparse::cuda {

// Whether PyTorch's dense product may be called: with torch.use_deterministic_algorithms() it raises an error unless
// CUBLAS_WORKSPACE_CONFIG is set, which our own kernels do not need.
bool may_call_dense();

// False, and the output is to be computed otherwise, where there is no memory for the dense temporary. Such a size is
// not asked for again: the failing allocation has emptied PyTorch's cache.
bool densify(const DenseSparseProblem& problem);
bool densify(const SparseSupportProblem& problem);

}  // namespace block_sparse::cuda
