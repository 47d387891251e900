// A ring of shared-memory stages between the warps that load and the warps that compute, guarded by Hopper's mbarriers.
//
// A stage is *full* once every loading warp has arrived and every byte announced for it is there, and *empty* once
// every reader has let go of it. All roles step through the stages in the same order and wait on every one, also where
// they have nothing to load or to read: one that skipped a stage would run a lap ahead of the others, or fall one
// behind.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include <cute/config.hpp>

namespace block_sparse {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;  // loading warps arrive, the copy engine counts bytes
using EmptyBarrier = cutlass::arch::ClusterBarrier;            // readers arrive

// A place in the ring; `phase` is the parity of the lap, as mbarrier waits want it.
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  CUTE_DEVICE void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <int kMaxStages>
struct RingBarriers {
  FullBarrier full[kMaxStages];
  EmptyBarrier empty[kMaxStages];

  // By one thread, before a barrier of the thread block. `loaders` and `readers`: arrivals that make a stage full,
  // apart from its bytes, and empty.
  CUTE_DEVICE void initialize(int stages, int loaders, int readers) {
    for (int stage = 0; stage < stages; ++stage) {
      full[stage].init(loaders);
      empty[stage].init(readers);
    }
    cutlass::arch::fence_barrier_init();
  }

  CUTE_DEVICE void wait_full(const RingPosition& at) { full[at.stage].wait(at.phase); }
  CUTE_DEVICE void wait_empty(const RingPosition& at) { empty[at.stage].wait(at.phase ^ 1); }
  // One loading warp's arrival on a stage into which it will copy `bytes`.
  CUTE_DEVICE void expect_bytes(const RingPosition& at, uint32_t bytes) { full[at.stage].arrive_and_expect_tx(bytes); }
  CUTE_DEVICE void release(int stage) { empty[stage].arrive(); }
  CUTE_DEVICE void release(int stage, int rank) { empty[stage].arrive(rank); }  // in that thread block of the cluster
  // What the copy engine signals.
  CUTE_DEVICE uint64_t* full_address(const RingPosition& at) { return reinterpret_cast<uint64_t*>(&full[at.stage]); }
};

// The barriers' waits do not stop the compiler from moving ordinary loads of shared memory across them: this does, and
// volatile loads stay where they are.
CUTE_DEVICE void keep_loads_below() { asm volatile("" ::: "memory"); }

// Shared memory that another warp wrote before it arrived on a barrier.
template <class T>
CUTE_DEVICE T load_shared(const T& value) {
  return *const_cast<const volatile T*>(&value);
}

template <class T>
CUTE_DEVICE void store_shared(T& target, T value) {
  *const_cast<volatile T*>(&target) = value;
}

}  // namespace block_sparse
