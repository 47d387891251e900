// From PyTorch's state (stream, device, allocator, float32 precision) to the torch-free launchers.
#include "cuda_backend.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdlib>
#include <string>

#include "cuda_check.h"
#include "cuda_densify.h"
#include "cuda_kernels.h"
#include "decode_plan.h"
#include "plan_record.h"

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

// Workspace of a launch on the current stream.
c10::DataPtr allocate(size_t bytes) {
  return bytes ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : c10::DataPtr();
}

Float32Precision float32_precision() {
  return at::globalContext().allowTF32CuBLAS() ? Float32Precision::kTF32 : Float32Precision::kHighest;
}

Plan plan_of(Kernel kernel) {
  return kernel == Kernel::kDecode ? Plan::kDecode : kernel == Kernel::kHopper ? Plan::kSm90 : Plan::kSm80;
}

// Densifies if that is the plan, and notes which plan runs; otherwise the caller launches the kernel on the blocks.
template <class Problem>
bool runs_densified(const Problem& problem, Operator op, Activation activation, Kernel kernel,
                    bool can_densify = true) {
  const cudaDeviceProp& properties = checked_device();
  const Gpu gpu{properties.major, properties.minor, properties.multiProcessorCount, int64_t(properties.totalGlobalMem)};
  const Product product{op,
                        problem.dtype,
                        float32_precision() == Float32Precision::kTF32,
                        kernel,
                        activation,
                        problem.geometry,
                        problem.tokens};
  const DensifyMode mode = densify_mode();
  const bool allowed = can_densify && (mode == DensifyMode::kAlways || may_call_dense());
  const bool densified = allowed && chooses_densify(product, gpu, mode) && densify(problem);
  record_plan(product, gpu, densified ? Plan::kDensify : plan_of(kernel));
  return densified;
}

}  // namespace

bool hopper_path() {
  const cudaDeviceProp& properties = checked_device();
  return !keeps_to_sm80() && properties.major == 9 && properties.minor == 0;
}

void dense_sparse(const DenseSparseProblem& problem) {
  const DeviceProperties device{checked_device().multiProcessorCount};
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const bool forward = problem.direction == Direction::kForward;
  const bool hopper = hopper_path() && block_task_sm90_serves(problem);
  const Kernel kernel =
      choose_kernel(problem.direction, problem.geometry, problem.tokens, block_task_decode_serves(problem), hopper);
  if (runs_densified(problem, forward ? Operator::kForward : Operator::kInputGradient, problem.activation, kernel)) {
    return;
  }
  if (kernel == Kernel::kHopper) {
    const c10::DataPtr workspace = allocate(kBlockTaskSm90Workspace);
    return check_launch(launch_block_task_sm90(problem, workspace.get(), device, stream));
  }
  const int32_t* line_order = forward ? problem.index.row_order : problem.index.col_order;
  if (kernel == Kernel::kDecode) {
    const c10::DataPtr workspace = allocate(block_task_decode_workspace(problem));
    return check_launch(launch_block_task_decode(problem, workspace.get(), device, line_order, stream));
  }
  check_launch(launch_block_task(problem, float32_precision(), line_order, stream));
}

void sparse_support(const SparseSupportProblem& problem) {
  const DeviceProperties device{checked_device().multiProcessorCount};
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const bool hopper = hopper_path() && block_task_back_sm90_serves(problem);
  const bool plain = !problem.accumulate && problem.result_dtype == problem.dtype;
  const Kernel kernel = hopper ? Kernel::kHopper : Kernel::kPortable;
  if (runs_densified(problem, Operator::kWeightGradient, Activation::kNone, kernel, plain)) return;
  if (hopper) {
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
