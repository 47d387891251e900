// Tensor maps: what Hopper's copy engine needs to know of a matrix.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace block_sparse {

// A row-major matrix [rows, columns] of 2-byte elements, its rows `stride` elements apart, moved in boxes of
// [box_rows, box_columns] whose rows of 128, 64 or 32 bytes are swizzled over as many bytes. The base and the stride in
// bytes must be multiples of 16. What a box holds past the matrix is zero when loaded and left out when stored.
// Returns null or an error in static storage.
inline const char* encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, const void* base, int64_t rows,
                                     int64_t columns, int64_t stride, int64_t box_rows, int64_t box_columns) {
  // Through the runtime, so that nothing links the driver library.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled (CUDA 12.0 or later is needed)";
  constexpr int64_t kElementSize = 2;
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t strides[] = {cuuint64_t(stride * kElementSize)};
  const cuuint32_t box[] = {cuuint32_t(box_columns), cuuint32_t(box_rows)};
  const cuuint32_t element_strides[] = {1, 1};
  const int64_t row_bytes = box_columns * kElementSize;
  const CUtensorMapSwizzle swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUresult status =
      encode(map, type, 2, const_cast<void*>(base), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? nullptr : "a tensor map could not be made for these addresses and strides";
}

}  // namespace block_sparse
