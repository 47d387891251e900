#include "block_task_back_launch.h"

namespace block_sparse {

const char* block_task_back_tf32(const SparseSupportProblem& problem, const SplitPlan& plan, const BackTarget& target,
                                 cudaStream_t stream) {
  return launch_block_task_back_math<TF32Math>(problem, plan, target, stream);
}

}  // namespace block_sparse
