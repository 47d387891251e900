// From PyTorch's state (stream, device, allocator, float32 precision) to the torch-free launchers.
#include "cuda_backend.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "cuda_kernels.h"

namespace block_sparse::cuda {
namespace {

const cudaDeviceProp& checked_device() {
  const cudaDeviceProp* properties = at::cuda::getCurrentDeviceProperties();
  TORCH_CHECK_NOT_IMPLEMENTED(
      properties->major >= 8, "pytorch_block_sparse needs a GPU of compute capability 8.0 or later; ", properties->name,
      " has ", properties->major, ".", properties->minor, ". Move the layer to the CPU, or use to_linear()");
  return *properties;
}

void check_launch(const char* error) {
  TORCH_CHECK(
      error == nullptr, "pytorch_block_sparse: a CUDA kernel could not be launched: ", error,
      ". If there is no kernel image for this GPU, rebuild with TORCH_CUDA_ARCH_LIST naming its compute capability "
      "(python -m pytorch_block_sparse info shows what was built)");
}

Float32Precision float32_precision() {
  return at::globalContext().allowTF32CuBLAS() ? Float32Precision::kTF32 : Float32Precision::kHighest;
}

}  // namespace

void dense_sparse(const DenseSparseProblem& problem) {
  const cudaDeviceProp& properties = checked_device();
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  if (properties.major == 9 && properties.minor == 0 && block_task_sm90_serves(problem)) {
    const c10::DataPtr workspace = c10::cuda::CUDACachingAllocator::get()->allocate(kBlockTaskSm90Workspace);
    return check_launch(launch_block_task_sm90(problem, workspace.get(), {properties.multiProcessorCount}, stream));
  }
  const int32_t* line_order =
      problem.direction == Direction::kForward ? problem.index.row_order : problem.index.col_order;
  check_launch(launch_block_task(problem, float32_precision(), line_order, stream));
}

void sparse_support(const SparseSupportProblem& problem) {
  const DeviceProperties device{checked_device().multiProcessorCount};
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const size_t bytes = block_task_back_workspace(problem, device);
  const c10::DataPtr workspace = bytes ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : c10::DataPtr();
  check_launch(launch_block_task_back(problem, float32_precision(), problem.dtype, workspace.get(), device, stream));
}

}  // namespace block_sparse::cuda
