#include "block_task_launch.h"
#include "cuda_families.h"

namespace block_sparse {

const char* block_task_float16(const DenseSparseProblem& problem, const int32_t* line_order, cudaStream_t stream) {
  return launch_block_task_math<Float16Math>(problem, line_order, stream);
}

}  // namespace block_sparse
