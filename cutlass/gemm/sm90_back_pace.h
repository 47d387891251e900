// Keeps the thread blocks of the Hopper weight gradient within a window of tokens of each other.
//
// They share strips through L2, which holds a few thousand tokens of all strips. Over a long sweep they drift further
// apart than that, and every strip is then read from memory many times. So each publishes now and then how far it has
// loaded, and one that is a window ahead of the slowest holds back. Nobody needs that for correctness: a thread block
// gives up after a bounded time, because the one it waits for may not run at all.
#pragma once

#include <cute/arch/util.hpp>
#include <cute/config.hpp>

#include "gemm/sm90_back_work.h"

namespace block_sparse {

constexpr int kBackPacePolls = 100;  // about a microsecond each, then a thread block no longer holds back

class BackPace {
  static constexpr uint32_t kDone = (1u << 24) - 1;

  uint32_t* progress_;  // [kBackPaceBlocks]: the launch's number << 24 | stages loaded
  uint32_t mine_;       // the same; with another launch's number a word counts as done
  uint32_t window_;     // in stages; 0: hold back no more
  uint4 seen_;

 public:
  // Whole warps call everything.
  CUTE_DEVICE BackPace(uint32_t* progress, uint64_t ticket, int window)
      : progress_(progress), mine_(uint32_t(ticket) << 24), window_(window) {
    if (window_ == 0) return;
    publish();
    load();
  }

  // Before every stage.
  CUTE_DEVICE void step() {
    if (window_ == 0 || ++mine_ % kBackPaceSteps != 0) return;
    publish();
    // What was loaded at the last look has arrived; it can only say too little.
    for (int poll = 0; loaded(mine_) > slowest() + window_; ++poll) {
      if (poll == kBackPacePolls) return finish();
      __nanosleep(200);
      load();
    }
    load();
  }

  CUTE_DEVICE void finish() {
    if (window_ == 0) return;
    window_ = 0;
    mine_ |= kDone;
    publish();
  }

 private:
  CUTE_DEVICE void publish() const {
    if (blockIdx.x < kBackPaceBlocks && threadIdx.x % 32 == 0) __stcg(progress_ + blockIdx.x, mine_);
  }
  CUTE_DEVICE void load() {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(seen_.x), "=r"(seen_.y), "=r"(seen_.z), "=r"(seen_.w)
                 : "l"(progress_ + threadIdx.x % 32 * 4)
                 : "memory");
  }
  CUTE_DEVICE uint32_t loaded(uint32_t word) const { return min(word ^ (mine_ & ~kDone), kDone); }
  CUTE_DEVICE uint32_t slowest() const {
    const uint32_t one = min(loaded(seen_.x), loaded(seen_.y)), other = min(loaded(seen_.z), loaded(seen_.w));
    return __reduce_min_sync(~0u, min(one, other));
  }
};

}  // namespace block_sparse
