// dense x dense on sparse support -> blocks, for Hopper (sm_90a): TMA, WGMMA, one persistent thread block per
// multiprocessor.
//
//   weight gradient  dW [nnz, bh, bw] = dyᵀ x on the stored blocks
//
//   loading warpgroup     sm90_back_loader.h     strips of dy and x, L2 -> a ring of stages (sm90_ring.h)
//                         sm90_back_pace.h       thread blocks stay together, because they share strips through L2
//   computing warpgroups  sm90_back_mainloop.h   stages -> accumulators
//                         sm90_back_epilogue.h   accumulators -> blocks of dW
//                         sm90_back_partial.h    the same where a tile's tokens are cut into ranges
//   all                   sm90_back_schedule.h   which tile of the work list (sm90_back_work.h) comes next
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <cute/arch/copy_sm90_desc.hpp>

#include "gemm/sm90_back_loader.h"
#include "gemm/sm90_back_mainloop.h"
#include "gemm/sm90_back_partial.h"

// The attribute is an error for earlier architectures.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define BLOCK_SPARSE_BACK_CLUSTER __cluster_dims__(block_sparse::kBackCluster, 1, 1)
#else
#define BLOCK_SPARSE_BACK_CLUSTER
#endif

namespace block_sparse {

struct BlockTaskBackSm90Params {
  const int32_t* work;  // the list
  int work_lines;       // its first lines of 128 bytes, at most kThreads
  int tokens;           // T
  bool may_split;       // the workspace below is there
  float4* partials;     // partial sums
  uint64_t* counters;   // [cut tiles, 2 warpgroups, kBackCluster], anything
  uint64_t ticket;      // of this launch, 56 bits
  uint32_t* progress;   // of the thread blocks (sm90_back_pace.h), anything
  int window;           // how far they may be apart, in stages; 0: any
  BackEpilogueParams epilogue;
};

template <class Element_, class Result_, int kPiece_>
struct BlockTaskBackSm90Config {
  using Element = Element_;
  using Result = Result_;
  static constexpr int kPiece = kPiece_;
  static constexpr int kStageTokens = kBackStageTokens;
  static constexpr int kStripBytes = kStageTokens * kPiece * 2;
  static constexpr int kStagesBytes = 56 * 32 * 64 * 2;  // 224 KB, shared out at run time: stages x the list's strips
  static constexpr int kSumsBytes = 64 * 64 * kBackMaxQuads * int(sizeof(float));  // of a warpgroup, in their place
  static_assert(kBackWarpgroups * kSumsBytes <= kStagesBytes);
  static constexpr int kMaxStages = 12;
  static constexpr int kPrefetchSteps = 8;  // before the end of a tile, what it is added to is brought into L2
  using Barriers = RingBarriers<kMaxStages>;
  static constexpr int kAlignment = 1024;  // of the 128-byte swizzle
  static constexpr int kSharedBytes = kAlignment + kStagesBytes + int(sizeof(Barriers));
  static constexpr int kThreads = 128 * (kBackWarpgroups + 1);
  static constexpr int kLoadingRegisters = 40;
  static constexpr int kComputingRegisters = 232;
};

// Where a tile is cut, a thread block leaves its sums where the stages were: once nobody reads those any more.
CUTE_DEVICE void back_wait_for_stages() {
  cutlass::arch::NamedBarrier::sync(128 * kBackWarpgroups, 1 + kBackWarpgroups);
}

// One tile, or one token range of it, by one warpgroup.
template <class Config, int kQuads>
CUTE_DEVICE void back_compute(const BlockTaskBackSm90Params& params, const BackItem& item, const BackTileShape& shape,
                              const int32_t* record, typename Config::Barriers& barriers, RingPosition& at,
                              uint32_t stages_address, int stages, int stage_bytes, int warpgroup) {
  constexpr int kPiece = Config::kPiece;
  const int steps = item.last_step - item.first_step;
  if constexpr (kQuads == 0) {
    back_skip<Config>(barriers, at, stages, steps);
    if (item.cluster >= 0) back_wait_for_stages();
  } else {
    const BackDestination<Config> destination(record, shape, warpgroup, params.epilogue.cell);
    float accumulator[32 * kQuads];
    const uint64_t a = back_descriptor<kPiece>(
        stages_address + shape.first_line(warpgroup, kPiece) * Config::kStripBytes, Config::kStripBytes);
    const uint64_t b = back_descriptor<kPiece>(stages_address + shape.first_strip(warpgroup) * Config::kStripBytes,
                                               Config::kStripBytes);
    const int early = params.epilogue.accumulate ? max(steps - Config::kPrefetchSteps, 0) : 0;
    back_mainloop<Config, kQuads>(accumulator, barriers, at, stages, stage_bytes, a, b, steps, early, [&] {
      BackEpilogue<Config>(params.epilogue, destination, shape.transposed).prefetch(4 * kQuads);
    });
    if (item.cluster < 0) {
      back_store(accumulator, BackEpilogue<Config>(params.epilogue, destination, shape.transposed));
    } else {
      back_wait_for_stages();
      store_to_shared(accumulator, stages_address + warpgroup * Config::kSumsBytes + threadIdx.x % 128 * 16);
    }
  }
}

// The ranges of a cut tile, by each computing warpgroup of its clusters.
template <class Config>
CUTE_DEVICE void back_reduce(const BlockTaskBackSm90Params& params, int clusters, const BackItem& item,
                             const BackTileShape& shape, const int32_t* record, int largest_quads,
                             uint32_t stages_address, int warpgroup) {
  cluster_arrive();
  const BackDestination<Config> destination(record, shape, warpgroup, params.epilogue.cell);
  const uint32_t rank = cluster_rank();
  const int64_t warpgroup_size = back_partial_floats(largest_quads) / 4;
  const int64_t first_cluster = int64_t(item.last_wave_tile) * clusters;
  const BackPartial<Config> partial{
      stages_address + warpgroup * Config::kSumsBytes,
      rank,
      clusters,
      params.partials + (first_cluster * kBackWarpgroups + warpgroup) * warpgroup_size,
      kBackWarpgroups * warpgroup_size,
      params.counters + (item.last_wave_tile * kBackWarpgroups + warpgroup) * kBackCluster + rank,
      params.ticket,
      int(threadIdx.x % 128),
      1 + warpgroup};
  cluster_wait();
  partial.reduce(shape.quads(warpgroup, Config::kPiece), item.cluster,
                 BackEpilogue<Config>(params.epilogue, destination, shape.transposed));
  cluster_wait();
}

template <class Config>
__global__ void BLOCK_SPARSE_BACK_CLUSTER __launch_bounds__(Config::kThreads, 1)
    block_task_back_sm90(const __grid_constant__ CUtensorMap input, const __grid_constant__ CUtensorMap output_gradient,
                         const BlockTaskBackSm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // other architectures of a build get an empty kernel, which nobody launches
  constexpr int kPiece = Config::kPiece;
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&input));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&output_gradient));
  }
  // The list is read in a chain of dependent loads: let one wait for memory serve them all.
  if (threadIdx.x < params.work_lines) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(params.work + 32 * threadIdx.x));
  }
  extern __shared__ uint8_t shared[];
  const uint32_t unaligned = cute::cast_smem_ptr_to_uint(shared);
  const uint32_t stages_address = (unaligned + Config::kAlignment - 1) / Config::kAlignment * Config::kAlignment;
  uint8_t* stages_base = shared + (stages_address - unaligned);
  auto& barriers = *reinterpret_cast<typename Config::Barriers*>(stages_base + Config::kStagesBytes);

  const int4 header = __ldg(reinterpret_cast<const int4*>(params.work));
  const int tiles = header.x, stage_bytes = header.y * Config::kStripBytes, largest_quads = header.z;
  const int stages = min(Config::kMaxStages, Config::kStagesBytes / max(stage_bytes, 1));
  const int loading_warps = BackLoader<Config>::warps_of_stage(header.y);
  if (threadIdx.x == 0) barriers.initialize(stages, loading_warps, 4 * kBackWarpgroups);
  __syncthreads();

  const BackSchedule schedule(params.work, tiles, gridDim.x, params.tokens, Config::kStageTokens, kPiece,
                              params.may_split, header.w);
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == kBackWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoadingRegisters>();
    const BackLoader<Config> loader{&input, &output_gradient, params.work};
    // One warp holds back for all: the others wait for the stages with it.
    BackPace pace(params.progress, params.ticket, threadIdx.x / 32 == 4 * kBackWarpgroups ? params.window : 0);
    if (pace.holds_back()) {
      loader.template run<true>(schedule, barriers, pace, stages_base, stages, stage_bytes, loading_warps,
                                threadIdx.x % 128);
      pace.finish();
    } else {
      loader.template run<false>(schedule, barriers, pace, stages_base, stages, stage_bytes, loading_warps,
                                 threadIdx.x % 128);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kComputingRegisters>();
    RingPosition at;
    const auto* directory = reinterpret_cast<const int2*>(params.work + kBackHeaderWords);
    BackItem item = schedule.item(blockIdx.x, 0);
    int2 next_entry = __ldg(directory + max(item.tile, 0));
    for (int wave = 0; item.tile >= 0; ++wave, item = schedule.item(blockIdx.x, wave)) {
      const int2 entry = next_entry;
      next_entry = __ldg(directory + max(schedule.item(blockIdx.x, wave + 1).tile, 0));
      const BackTileShape shape = BackTileShape::decode(uint32_t(entry.y));
      const int32_t* record = params.work + entry.x;
      const auto compute = [&](auto quads) {
        back_compute<Config, decltype(quads)::value>(params, item, shape, record, barriers, at, stages_address, stages,
                                                     stage_bytes, warpgroup);
      };
      // Straight-line code for each width: a run-time width inside the WGMMA batch would serialise it.
      switch (shape.quads(warpgroup, kPiece)) {
        case 0:
          compute(cute::Int<0>{});
          break;
        case 1:
          compute(cute::Int<1>{});
          break;
        case 2:
          compute(cute::Int<2>{});
          break;
        case 3:
          compute(cute::Int<3>{});
          break;
        case 4:
          compute(cute::Int<4>{});
          break;
        case 5:
          compute(cute::Int<5>{});
          break;
        default:
          compute(cute::Int<kBackMaxQuads>{});
          break;
      }
      if (item.cluster >= 0) {
        back_reduce<Config>(params, schedule.clusters, item, shape, record, largest_quads, stages_address, warpgroup);
      }
    }
  }
#endif
}

}  // namespace block_sparse
