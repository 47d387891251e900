// A launcher's message as a PyTorch error.
#pragma once

#include <c10/util/Exception.h>

namespace block_sparse::cuda {

inline void check_launch(const char* error) {
  TORCH_CHECK(
      error == nullptr, "pytorch_block_sparse: a CUDA kernel could not be launched: ", error,
      ". If there is no kernel image for this GPU, rebuild with TORCH_CUDA_ARCH_LIST naming its compute capability "
      "(python -m pytorch_block_sparse info shows what was built)");
}

}  // namespace block_sparse::cuda
