#include "block_task_back_sm90_launch.h"

namespace block_sparse {

const char* block_task_back_sm90_bfloat16_float32(const BackSm90Call& call) {
  return launch_back_sm90<cutlass::bfloat16_t, float, false>(call);
}

}  // namespace block_sparse
