// Tiles of the Hopper weight gradient that are cut into token ranges: partial sums through a workspace.
//
// Every thread block writes its float32 partial sums and counts itself; the one that finds all others done adds the
// ranges up in their order, so results repeat bit by bit, and nobody ever waits for another thread block.
//
// A counter may hold anything before the launch, so that none has to be cleared (a memset costs 5 µs on the stream):
// its upper 56 bits must be the launch's ticket for its count to be valid, and the last to arrive takes the ticket out
// again, because a CUDA graph launches the same ticket many times.
#pragma once

#include "gemm/sm90_back_epilogue.h"

namespace block_sparse {

template <class Config>
struct BackPartial {
  float4* partials;    // [ranges, 2, 8 quads, 128]: of this tile and this warpgroup, the first range
  int64_t range_size;  // float4 from one range to the next
  uint64_t* counter;   // ticket << 8 | ranges done
  uint64_t ticket;     // this launch's, not zero
  int splits;
  int thread;  // 0 .. 127 of the warpgroup

  template <int kSize>
  CUTE_DEVICE void write(const float (&accumulator)[kSize], int part) const {
    float4* to = partials + part * range_size + thread;
    CUTE_UNROLL
    for (int i = 0; i < kSize / 4; ++i) {
      __stcg(to + i * 128,
             make_float4(accumulator[4 * i], accumulator[4 * i + 1], accumulator[4 * i + 2], accumulator[4 * i + 3]));
    }
  }

  // Whether all ranges of the tile are written; the whole warpgroup calls. `barrier`: a named barrier of its own.
  CUTE_DEVICE bool arrive(int barrier) const {
    __threadfence();
    cutlass::arch::NamedBarrier::sync(128, barrier);
    const bool last = thread == 0 && count_one() == splits;
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "barrier.cta.red.or.pred q, %2, 128, p;\n"
        "selp.u32 %0, 1, 0, q;\n}"
        : "=r"(any)
        : "r"(uint32_t(last)), "r"(barrier)
        : "memory");
    __threadfence();
    return any != 0;
  }

  // How many ranges are done, this one included.
  CUTE_DEVICE int count_one() const {
    auto* word = reinterpret_cast<unsigned long long*>(counter);
    unsigned long long seen = __ldcv(word), next;
    for (;;) {
      next = seen >> 8 == ticket ? seen + 1 : ticket << 8 | 1;
      const unsigned long long observed = atomicCAS(word, seen, next);
      if (observed == seen) break;
      seen = observed;
    }
    const int count = int(next & 255);
    if (count == splits) atomicExch(word, 0ull);
    return count;
  }

  CUTE_DEVICE void reduce(int quads, const BackEpilogue<Config>& epilogue) const {
    if (!epilogue.accumulates()) {
      if (epilogue.transposed()) {
        reduce_as<true, false>(quads, epilogue);
      } else {
        reduce_as<false, false>(quads, epilogue);
      }
    } else if (epilogue.transposed()) {
      reduce_as<true, true>(quads, epilogue);
    } else {
      reduce_as<false, true>(quads, epilogue);
    }
  }

 private:
  template <bool kTransposed, bool kAccumulate>
  CUTE_DEVICE void reduce_as(int quads, const BackEpilogue<Config>& epilogue) const {
    constexpr int kFragments = 2, kRanges = 4;  // 16 loads of 16 bytes a thread under way
    CUTE_NO_UNROLL
    for (int fragment = 0; fragment < 4 * quads; fragment += kFragments) {
      float4 sums[2 * kFragments] = {};
      for (int range = 0; range < splits; range += kRanges) {
        float4 loaded[kRanges][2 * kFragments];
        CUTE_UNROLL
        for (int r = 0; r < kRanges; ++r) {
          CUTE_UNROLL
          for (int i = 0; i < 2 * kFragments; ++i) {
            if (range + r < splits) {
              loaded[r][i] = __ldcg(partials + (range + r) * range_size + (2 * fragment + i) * 128 + thread);
            } else {
              loaded[r][i] = make_float4(0.f, 0.f, 0.f, 0.f);
            }
          }
        }
        CUTE_UNROLL
        for (int r = 0; r < kRanges; ++r) {
          CUTE_UNROLL
          for (int i = 0; i < 2 * kFragments; ++i) {
            sums[i].x += loaded[r][i].x;
            sums[i].y += loaded[r][i].y;
            sums[i].z += loaded[r][i].z;
            sums[i].w += loaded[r][i].w;
          }
        }
      }
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        const float4 left = sums[2 * f], right = sums[2 * f + 1];
        float eight[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
        epilogue.template store<kTransposed, kAccumulate>(eight, fragment + f);
      }
    }
  }
};

}  // namespace block_sparse
