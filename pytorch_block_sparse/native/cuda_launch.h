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
template <class Kernel>
cudaError_t allow_shared_bytes(Kernel* kernel, size_t bytes) {
  if (bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              int(bytes));
}

template <class Kernel, class... Arguments>
const char* launch(Kernel* kernel, dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                   const Arguments&... arguments) {
  if (cudaError_t status = allow_shared_bytes(kernel, shared_bytes)) return status_message(status);
  kernel<<<grid, threads, shared_bytes, stream>>>(arguments...);
  return status_message(cudaGetLastError());
}

// The same in clusters of `cluster` thread blocks, which divides grid.x.
template <class Kernel, class... Arguments>
const char* launch_clusters(Kernel* kernel, unsigned cluster, dim3 grid, int threads, size_t shared_bytes,
                            cudaStream_t stream, const Arguments&... arguments) {
  if (cudaError_t status = allow_shared_bytes(kernel, shared_bytes)) return status_message(status);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return status_message(cudaLaunchKernelEx(&config, kernel, arguments...));
}
#endif

// Thread blocks of a kernel that strides over `elements`.
inline int64_t grid_stride_blocks(int64_t elements, int threads) {
  int64_t blocks = (elements + threads - 1) / threads;
  return blocks < (int64_t(1) << 30) ? blocks : int64_t(1) << 30;
}

}  // namespace block_sparse
