#include "block_task_launch.h"
#include "cuda_families.h"

namespace block_sparse {

const char* block_task_3xtf32_two_levels(const DenseSparseProblem& problem, const int32_t* line_order,
                                         cudaStream_t stream) {
  return launch_block_task_math<TwoLevelTripleTF32Math>(problem, line_order, stream);
}

}  // namespace block_sparse
