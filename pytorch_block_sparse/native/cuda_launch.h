// What the launchers share: how a problem's shape selects a kernel, and checked launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "problem.h"

namespace block_sparse {

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Rows of `stride` elements can be read and written in 16-byte vectors.
inline bool rows_aligned(const void* pointer, int64_t stride, size_t element_size) {
  return is_aligned(pointer) && stride * element_size % 16 == 0;
}

inline const char* status_message(cudaError_t status) {
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

#ifdef __CUDACC__
template <class Kernel, class... Arguments>
const char* launch(Kernel* kernel, dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                   const Arguments&... arguments) {
  if (shared_bytes > 48 * 1024) {
    cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                              cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (status != cudaSuccess) return status_message(status);
  }
  kernel<<<grid, threads, shared_bytes, stream>>>(arguments...);
  return status_message(cudaGetLastError());
}
#endif

// Thread blocks of a kernel that strides over `elements`.
inline int64_t grid_stride_blocks(int64_t elements, int threads) {
  int64_t blocks = (elements + threads - 1) / threads;
  return blocks < (int64_t(1) << 30) ? blocks : int64_t(1) << 30;
}

}  // namespace block_sparse
