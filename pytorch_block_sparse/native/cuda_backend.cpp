// From PyTorch's state (stream, device, allocator, float32 precision) to the torch-free launchers.
#include "cuda_backend.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdlib>
#include <string>

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

bool keeps_to_sm80() {
  static const bool keeps = [] {
    const char* variable = std::getenv("BLOCK_SPARSE_CUDA_PATH");
    const std::string path = variable ? variable : "";
    TORCH_CHECK_VALUE(path.empty() || path == "sm80", "BLOCK_SPARSE_CUDA_PATH must be sm80 or unset, got ", path);
    return !path.empty();
  }();
  return keeps;
}

void check_launch(const char* error) {
  TORCH_CHECK(
      error == nullptr, "pytorch_block_sparse: a CUDA kernel could not be launched: ", error,
      ". If there is no kernel image for this GPU, rebuild with TORCH_CUDA_ARCH_LIST naming its compute capability "
      "(python -m pytorch_block_sparse info shows what was built)");
}

// Workspace of a launch on the current stream.
c10::DataPtr allocate(size_t bytes) {
  return bytes ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : c10::DataPtr();
}

Float32Precision float32_precision() {
  return at::globalContext().allowTF32CuBLAS() ? Float32Precision::kTF32 : Float32Precision::kHighest;
}

}  // namespace

bool hopper_path() {
  const cudaDeviceProp& properties = checked_device();
  return !keeps_to_sm80() && properties.major == 9 && properties.minor == 0;
}

void dense_sparse(const DenseSparseProblem& problem) {
  const DeviceProperties device{checked_device().multiProcessorCount};
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  if (hopper_path() && block_task_sm90_serves(problem)) {
    const c10::DataPtr workspace = allocate(kBlockTaskSm90Workspace);
    return check_launch(launch_block_task_sm90(problem, workspace.get(), device, stream));
  }
  const int32_t* line_order =
      problem.direction == Direction::kForward ? problem.index.row_order : problem.index.col_order;
  check_launch(launch_block_task(problem, float32_precision(), line_order, stream));
}

void sparse_support(const SparseSupportProblem& problem) {
  const DeviceProperties device{checked_device().multiProcessorCount};
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  if (hopper_path() && block_task_back_sm90_serves(problem)) {
    const c10::DataPtr workspace = allocate(block_task_back_sm90_workspace(problem, device));
    return check_launch(launch_block_task_back_sm90(problem, workspace.get(), device, stream));
  }
  const c10::DataPtr workspace = allocate(block_task_back_workspace(problem, device));
  check_launch(launch_block_task_back(problem, float32_precision(), workspace.get(), device, stream));
}

void bias_grad(const BiasGradProblem& problem) {
  const DeviceProperties device{checked_device().multiProcessorCount};
  const c10::DataPtr workspace = allocate(bias_grad_workspace(problem, device));
  check_launch(launch_bias_grad(problem, workspace.get(), device, at::cuda::getCurrentCUDAStream()));
}

}  // namespace block_sparse::cuda
