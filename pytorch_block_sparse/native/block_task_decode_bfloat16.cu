#include "block_task_decode_launch.h"
#include "cuda_families.h"

namespace block_sparse {

const char* block_task_decode_bfloat16(const DenseSparseProblem& problem, const DecodePlan& plan,
                                       const int32_t* line_order, int multiprocessors, cudaStream_t stream) {
  return launch_decode<BFloat16Math>(problem, plan, line_order, multiprocessors, stream);
}

}  // namespace block_sparse
