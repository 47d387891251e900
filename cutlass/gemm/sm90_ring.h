// The ring of shared-memory stages between loading and multiplying warps, on Hopper's mbarriers.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

namespace block_sparse {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;  // loaders arrive, the copy engine counts bytes
using EmptyBarrier = cutlass::arch::ClusterBarrier;            // consumers arrive

// Place in a ring of kStages; `phase` is the parity of the lap, as mbarrier waits want it.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The barriers' waits do not stop the compiler from moving ordinary loads of shared memory across them: this does, and
// volatile loads stay where they are.
__device__ inline void keep_loads_below() { asm volatile("" ::: "memory"); }

// Shared memory that another warp wrote before it arrived on a barrier.
template <class T>
__device__ T load_shared(const T& value) {
  return *const_cast<const volatile T*>(&value);
}

template <class T>
__device__ void store_shared(T& target, T value) {
  *const_cast<volatile T*>(&target) = value;
}

}  // namespace block_sparse
