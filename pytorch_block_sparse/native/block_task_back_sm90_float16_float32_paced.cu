#include "block_task_back_sm90_launch.h"

namespace block_sparse {

const char* block_task_back_sm90_float16_float32_paced(const BackSm90Call& call) {
  return launch_back_sm90<cutlass::half_t, float, true>(call);
}

}  // namespace block_sparse
