#include "block_task_back_launch.h"

namespace block_sparse {

const char* block_task_back_bfloat16(const SparseSupportProblem& problem, const SplitPlan& plan, bool result_float32,
                                     void* result, cudaStream_t stream) {
  return launch_block_task_back_math<BFloat16Math>(problem, plan, result_float32, result, stream);
}

}  // namespace block_sparse
