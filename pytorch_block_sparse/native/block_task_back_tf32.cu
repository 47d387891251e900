#include "block_task_back_launch.h"

namespace block_sparse {

const char* block_task_back_tf32(const SparseSupportProblem& problem, const SplitPlan& plan, bool result_float32,
                                 void* result, cudaStream_t stream) {
  return launch_block_task_back_math<TF32Math>(problem, plan, result_float32, result, stream);
}

}  // namespace block_sparse
