#include "block_task_sm90_launch.h"
#include "cuda_families.h"

namespace block_sparse {

const char* block_task_sm90_float16(const DenseSparseProblem& problem, uint64_t* counter, int multiprocessors,
                                    cudaStream_t stream) {
  return launch_block_task_sm90_element<cutlass::half_t>(problem, counter, multiprocessors, stream);
}

}  // namespace block_sparse
