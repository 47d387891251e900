// Tiles of the Hopper weight gradient that are cut into token ranges: how the ranges' sums are added up.
//
// The thread blocks of a cluster leave their float32 sums in shared memory, where the stages were, and each of them
// adds up an equal share of the columns, its own and the others'. A tile with several clusters goes on through a
// workspace: each share is written and counted, and the thread block that finds all of its kind done adds them. All
// additions have a fixed order, so results repeat bit by bit, and nobody ever waits for a thread block outside its
// cluster.
//
// A counter may hold anything before the launch, so that none has to be cleared (a memset costs 5 µs on the stream):
// its upper 56 bits must be the launch's ticket for its count to be valid, and the last to arrive takes the ticket out
// again, because a CUDA graph launches the same ticket many times.
#pragma once

#include "gemm/sm90_back_epilogue.h"

namespace block_sparse {

// The fragments of N that one thread block of the cluster adds up.
struct BackShare {
  int first;
  int last;  // exclusive
  CUTE_DEVICE BackShare(int quads, uint32_t rank)
      : first(int(4 * quads * rank / kBackCluster)), last(int(4 * quads * (rank + 1) / kBackCluster)) {}
};

// Barrier of all threads of a cluster that have not exited; memory is in order across it.
CUTE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
CUTE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

CUTE_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Sums of a warpgroup in shared memory: float4 [fragments, 2, 128 threads].
CUTE_DEVICE float4 load_from_cluster(uint32_t shared_address, uint32_t rank) {
  float4 value;
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(shared_address), "r"(rank)
      : "memory");
  return value;
}

template <int kSize>
CUTE_DEVICE void store_to_shared(const float (&accumulator)[kSize], uint32_t shared_address) {
  CUTE_UNROLL
  for (int i = 0; i < kSize / 4; ++i) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address + i * 2048), "f"(accumulator[4 * i]),
                 "f"(accumulator[4 * i + 1]), "f"(accumulator[4 * i + 2]), "f"(accumulator[4 * i + 3])
                 : "memory");
  }
}

// Adds `ranges` sums in order, and hands two fragments at a time to `take(left and right halves [4], fragment)`.
// `load(range, half)`: half = 2 fragment, 2 fragment + 1.
template <int kRanges, class Load, class Take>
CUTE_DEVICE void add_ranges(const BackShare& share, int ranges, const Load& load, const Take& take) {
  constexpr int kHalves = 4;  // kRanges x kHalves loads of 16 bytes a thread are under way
  CUTE_NO_UNROLL
  for (int fragment = share.first; fragment < share.last; fragment += kHalves / 2) {
    float4 sums[kHalves] = {};
    for (int range = 0; range < ranges; range += kRanges) {
      float4 loaded[kRanges][kHalves];
      CUTE_UNROLL
      for (int r = 0; r < kRanges; ++r) {
        CUTE_UNROLL
        for (int i = 0; i < kHalves; ++i) {
          loaded[r][i] = range + r < ranges ? load(range + r, 2 * fragment + i) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
      }
      CUTE_UNROLL
      for (int r = 0; r < kRanges; ++r) {
        CUTE_UNROLL
        for (int i = 0; i < kHalves; ++i) {
          sums[i].x += loaded[r][i].x;
          sums[i].y += loaded[r][i].y;
          sums[i].z += loaded[r][i].z;
          sums[i].w += loaded[r][i].w;
        }
      }
    }
    take(sums, fragment);
  }
}

template <class Config, bool kTransposed, bool kAccumulate>
CUTE_DEVICE void store_fragments(const float4 (&sums)[4], int fragment, const BackEpilogue<Config>& epilogue) {
  CUTE_UNROLL
  for (int f = 0; f < 2; ++f) {
    const float4 left = sums[2 * f], right = sums[2 * f + 1];
    float eight[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
    epilogue.template store<kTransposed, kAccumulate>(eight, fragment + f);
  }
}

template <class Config>
struct BackPartial {
  uint32_t sums_address;  // this warpgroup's sums in shared memory
  uint32_t rank;          // in the cluster
  int clusters;           // of the tile
  float4* partials;       // [clusters, 2 warpgroups, fragments, 2, 128]: of this tile and this warpgroup, the first's
  int64_t cluster_size;   // float4 from one cluster to the next
  uint64_t* counter;      // of this tile, warpgroup and rank: ticket << 8 | clusters done
  uint64_t ticket;        // this launch's, not zero
  int thread;             // 0 .. 127 of the warpgroup
  int barrier;            // a named barrier of the warpgroup's own

  // Once all sums of the cluster lie in shared memory.
  CUTE_DEVICE void reduce(int quads, int cluster, const BackEpilogue<Config>& epilogue) const {
    const BackShare share(quads, rank);
    const auto from_cluster = [&](int range, int half) {
      return load_from_cluster(sums_address + half * 2048 + thread * 16, range);
    };
    const auto from_workspace = [&](int range, int half) {
      return __ldcg(partials + range * cluster_size + half * 128 + thread);
    };
    if (clusters == 1) {
      store_sums<kBackCluster>(share, kBackCluster, from_cluster, epilogue);
      cluster_arrive();  // nobody may exit while its shared memory is read
      return;
    }
    add_ranges<kBackCluster>(share, kBackCluster, from_cluster, [&](const float4(&sums)[4], int fragment) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        __stcg(partials + cluster * cluster_size + (2 * fragment + i) * 128 + thread, sums[i]);
      }
    });
    cluster_arrive();
    if (arrive()) store_sums<4>(share, clusters, from_workspace, epilogue);
  }

 private:
  template <int kRanges, class Load>
  CUTE_DEVICE void store_sums(const BackShare& share, int ranges, const Load& load,
                              const BackEpilogue<Config>& epilogue) const {
    epilogue.dispatch([&](auto transposed, auto accumulate) {
      add_ranges<kRanges>(share, ranges, load, [&](const float4(&sums)[4], int fragment) {
        store_fragments<Config, decltype(transposed)::value, decltype(accumulate)::value>(sums, fragment, epilogue);
      });
    });
  }

  // Whether all clusters have written this share; the whole warpgroup calls.
  CUTE_DEVICE bool arrive() const {
    __threadfence();
    cutlass::arch::NamedBarrier::sync(128, barrier);
    const bool last = thread == 0 && count_one() == clusters;
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

  // How many clusters are done, this one included.
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
    if (count == clusters) atomicExch(word, 0ull);
    return count;
  }
};

}  // namespace block_sparse
