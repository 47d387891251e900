#include "cuda_tensor_map.h"

namespace block_sparse {
namespace {

// Taken from the driver at run time, so that nothing links libcuda and the library loads on a machine without it.
auto encode_function() {
  static const auto function = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) address = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(address);
  }();
  return function;
}

CUtensorMapSwizzle swizzle(int box_columns) {
  switch (box_columns) {
    case 64:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case 32:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_32B;
  }
}

}  // namespace

const char* encode_tensor_map(const TensorMapShape& shape, CUtensorMap* map) {
  const auto encode = encode_function();
  if (!encode) return "block_sparse: the CUDA driver has no cuTensorMapEncodeTiled (12.0 or later is needed)";
  const cuuint64_t sizes[2] = {cuuint64_t(shape.columns), cuuint64_t(shape.rows)};
  const cuuint64_t strides[1] = {cuuint64_t(shape.stride) * 2};
  const cuuint32_t box[2] = {cuuint32_t(shape.box_columns), cuuint32_t(shape.box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const auto type =
      shape.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto encode_once = [&] {
    return encode(map, type, 2, const_cast<void*>(shape.base), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle(shape.box_columns), shape.promotion,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode_once();
  if (status != CUDA_SUCCESS) {
    // A thread has no context before its first call of the runtime, and this may come before that: in a backward's.
    int device;
    if (cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess) status = encode_once();
  }
  return status == CUDA_SUCCESS ? nullptr : "block_sparse: cuTensorMapEncodeTiled refused an operand";
}

}  // namespace block_sparse
