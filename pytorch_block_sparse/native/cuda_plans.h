// Which CUDA kernel serves which dtype and block, in words. No torch header.
#pragma once

#include <string>
#include <vector>

namespace block_sparse {

struct CudaPlan {
  std::string dtype;
  std::string blocks;
  std::string kernel;
};

// `hopper`: whether the GPU and the environment let the Hopper kernels run.
std::vector<CudaPlan> cuda_plans(bool hopper);

}  // namespace block_sparse
