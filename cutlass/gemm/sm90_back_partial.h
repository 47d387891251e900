// Tiles of the Hopper weight gradient that are cut into token ranges: partial sums through a workspace.
//
// Every thread block writes its float32 partial sums. They are cut along N into *slices*, one a range, each the own of
// that range's thread block, and a slice has a counter: a thread block counts itself on the others' slices, waits until
// all of them have counted themselves on its own, and adds that up, in the order of the ranges. So results repeat bit
// by bit, and the ranges' thread blocks share the work. Nobody depends on a thread block that may not run yet: who has
// waited too long counts itself on its own slice and leaves, and whoever makes that count complete adds the slice up.
//
// A counter may hold anything before the launch, so that none has to be cleared (a memset costs 5 µs on the stream):
// its upper 56 bits must be the launch's ticket for its count to be valid. `prepare` puts the ticket in; only this
// launch writes there, so if the exchange fails another thread block has done it. Every range counts once, or has seen
// all others count; whoever completes the count takes the ticket out again, because a CUDA graph launches the same
// ticket many times.
#pragma once

#include "gemm/sm90_back_epilogue.h"

namespace block_sparse {

constexpr int kBackPartialPolls = 24;  // about half a microsecond each: how long a thread block waits for the others

template <class Config>
struct BackPartial {
  float4* partials;    // [ranges, 2, 8 quads, 128]: of this tile and this warpgroup, the first range
  int range_size;      // float4 from one range to the next
  uint64_t* counters;  // [ranges, 2]: ticket << 8 | ranges done with the slice; of this tile and this warpgroup
  uint64_t ticket;     // this launch's, not zero
  int splits;          // ranges
  int part;            // which range is ours
  int quads;           // of this warpgroup
  int thread;          // 0 .. 127 of the warpgroup

  // Before the products, so that nobody waits for it.
  CUTE_DEVICE void prepare() const {
    if (thread >= slices()) return;
    const unsigned long long seen = __ldcv(word(thread));
    if (seen >> 8 != ticket) atomicCAS(word(thread), seen, ticket << 8);
  }

  template <int kSize>
  CUTE_DEVICE void write(const float (&accumulator)[kSize]) const {
    float4* to = partials + int64_t(part) * range_size + thread;
    CUTE_UNROLL
    for (int i = 0; i < kSize / 4; ++i) {
      __stcg(to + i * 128,
             make_float4(accumulator[4 * i], accumulator[4 * i + 1], accumulator[4 * i + 2], accumulator[4 * i + 3]));
    }
  }

  // The slices that this warpgroup has to add up, a bit each; all of it calls, after `write`. `barrier`: a named
  // barrier of its own; `shared`: a word of its own.
  CUTE_DEVICE uint32_t claim(int barrier, uint32_t& shared) const {
    static_assert(kBackMaxSplits <= 32);
    __threadfence();
    cutlass::arch::NamedBarrier::sync(128, barrier);
    if (thread < 32) {
      const int slice = thread;
      bool complete = slice < slices() && slice != part && count_one(slice);
      __syncwarp();
      if (slice == part && slice < slices()) complete = wait_for_others() || count_one(slice);
      const uint32_t mine = __ballot_sync(~0u, complete);
      if (complete) atomicExch(word(slice), 0ull);
      if (thread == 0) store_shared(shared, mine);
    }
    cutlass::arch::NamedBarrier::sync(128, barrier);
    __threadfence();
    return load_shared(shared);
  }

  CUTE_DEVICE void reduce(uint32_t claimed, const BackEpilogue<Config>& epilogue) const {
    if (!epilogue.accumulates()) {
      if (epilogue.transposed()) {
        reduce_as<true, false>(claimed, epilogue);
      } else {
        reduce_as<false, false>(claimed, epilogue);
      }
    } else if (epilogue.transposed()) {
      reduce_as<true, true>(claimed, epilogue);
    } else {
      reduce_as<false, true>(claimed, epilogue);
    }
  }

 private:
  static constexpr int kLoads = Config::kFragmentColumns / 8;  // of 16 bytes, of a fragment and range, a thread

  CUTE_DEVICE int fragments() const { return 64 / Config::kFragmentColumns * quads; }
  CUTE_DEVICE int slices() const { return min(splits, fragments()); }
  CUTE_DEVICE unsigned long long* word(int slice) const {
    return reinterpret_cast<unsigned long long*>(counters + slice * kBackWarpgroups);
  }

  // Whether that makes the count complete.
  CUTE_DEVICE bool count_one(int slice) const { return int(atomicAdd(word(slice), 1ull) & 255) + 1 == splits; }

  CUTE_DEVICE bool wait_for_others() const {
    for (int poll = 0; poll < kBackPartialPolls; ++poll) {
      if (int(__ldcv(word(part)) & 255) + 1 == splits) return true;
      __nanosleep(100);
    }
    return false;
  }

  template <bool kTransposed, bool kAccumulate>
  CUTE_DEVICE void reduce_as(uint32_t claimed, const BackEpilogue<Config>& epilogue) const {
    for (; claimed != 0; claimed &= claimed - 1) {
      const int slice = __ffs(claimed) - 1;
      const int first = fragments() * slice / slices(), last = fragments() * (slice + 1) / slices();
      // 16 loads of 16 bytes a thread under way
      if (splits <= 2) {
        reduce_slice<kTransposed, kAccumulate, 8 / kLoads, 2>(first, last, epilogue);
      } else {
        reduce_slice<kTransposed, kAccumulate, 4 / kLoads, 4>(first, last, epilogue);
      }
    }
  }

  template <bool kTransposed, bool kAccumulate, int kFragments, int kRanges>
  CUTE_DEVICE void reduce_slice(int first, int last, const BackEpilogue<Config>& epilogue) const {
    CUTE_NO_UNROLL
    for (int fragment = first; fragment < last; fragment += kFragments) {
      float4 sums[kLoads * kFragments] = {};
      CUTE_NO_UNROLL
      for (int range = 0; range < splits; range += kRanges) {
        float4 loaded[kRanges][kLoads * kFragments];
        CUTE_UNROLL
        for (int r = 0; r < kRanges; ++r) {
          CUTE_UNROLL
          for (int i = 0; i < kLoads * kFragments; ++i) {
            if (range + r < splits && fragment + i / kLoads < last) {
              loaded[r][i] =
                  __ldcg(partials + int64_t(range + r) * range_size + (kLoads * fragment + i) * 128 + thread);
            } else {
              loaded[r][i] = make_float4(0.f, 0.f, 0.f, 0.f);
            }
          }
        }
        CUTE_UNROLL
        for (int r = 0; r < kRanges; ++r) {
          CUTE_UNROLL
          for (int i = 0; i < kLoads * kFragments; ++i) {
            sums[i].x += loaded[r][i].x;
            sums[i].y += loaded[r][i].y;
            sums[i].z += loaded[r][i].z;
            sums[i].w += loaded[r][i].w;
          }
        }
      }
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        float total[4 * kLoads];
        CUTE_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          const float4 four = sums[kLoads * f + i];
          total[4 * i] = four.x, total[4 * i + 1] = four.y, total[4 * i + 2] = four.z, total[4 * i + 3] = four.w;
        }
        if (fragment + f < last) epilogue.template store<kTransposed, kAccumulate>(total, fragment + f);
      }
    }
  }
};

}  // namespace block_sparse
