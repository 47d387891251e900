#include "block_task_sm90_launch.h"
#include "cuda_families.h"

namespace block_sparse {

const char* block_task_sm90_float16(const DenseSparseProblem& problem, const int32_t* work, int* counter,
                                    int multiprocessors, cudaStream_t stream) {
  return problem.direction == Direction::kForward
             ? launch_block_task_sm90<cutlass::half_t, false>(problem, work, counter, multiprocessors, stream)
             : launch_block_task_sm90<cutlass::half_t, true>(problem, work, counter, multiprocessors, stream);
}

}  // namespace block_sparse
