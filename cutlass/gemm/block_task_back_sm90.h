// dense x dense on sparse support -> blocks, for Hopper (sm_90a): TMA, WGMMA, one persistent thread block per
// multiprocessor.
//
//   weight gradient  dW [nnz, bh, bw] = dyᵀ x on the stored blocks
//
//   loading warpgroup     sm90_back_loader.h     strips of dy and x, L2 -> a ring of stages (sm90_ring.h)
//                         sm90_back_pace.h       over many tokens, thread blocks wait for each other
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

namespace block_sparse {

struct BlockTaskBackSm90Params {
  const int32_t* work;  // the list
  int tokens;           // T
  bool may_split;       // the workspace below is there
  float4* partials;     // partial sums
  uint64_t* counters;   // [thread blocks, 2], anything
  uint64_t ticket;      // of this launch, 56 bits
  BackEpilogueParams epilogue;
  uint32_t* progress;  // of the thread blocks, anything; only if kPaced
  int window;          // how far they may be apart, in stages
};

// `kPaced_`: thread blocks stay within a window of tokens of each other.
template <class Element_, class Result_, int kPiece_, bool kPaced_>
struct BlockTaskBackSm90Config {
  using Element = Element_;
  using Result = Result_;
  static constexpr int kPiece = kPiece_;
  static constexpr bool kPaced = kPaced_;
  static constexpr int kStageTokens = kBackStageTokens;
  static constexpr int kStripBytes = kStageTokens * kPiece * 2;
  static constexpr int kStagesBytes = 56 * 32 * 64 * 2;  // 224 KB, shared out at run time: stages x the list's strips
  static constexpr int kMaxStages = 12;
  using Barriers = RingBarriers<kMaxStages>;
  static constexpr int kAlignment = 1024;  // of the 128-byte swizzle
  static constexpr int kSharedBytes = kAlignment + kStagesBytes + int(sizeof(Barriers));
  static constexpr int kThreads = 128 * (kBackWarpgroups + 1);
  // Together no more than what the kernel starts with, 168 a thread: else its start waits for ever.
  static constexpr int kLoadingRegisters = kPaced ? 40 : 24;
  static constexpr int kComputingRegisters = kPaced ? 232 : 240;
};

// One tile, or one token range of it, by one warpgroup.
template <class Config, int kQuads>
CUTE_DEVICE void back_compute(const BlockTaskBackSm90Params& params, const BackSchedule& schedule, const BackItem& item,
                              const BackTileShape& shape, const int32_t* record, int largest_quads,
                              typename Config::Barriers& barriers, RingPosition& at, uint32_t stages_address,
                              int stages, int stage_bytes, int warpgroup) {
  constexpr int kPiece = Config::kPiece;
  const BackDestination<Config> destination(record, shape, warpgroup, params.epilogue.cell);
  float accumulator[32 * kQuads];
  const uint64_t a = back_descriptor<kPiece>(stages_address + shape.first_line(warpgroup, kPiece) * Config::kStripBytes,
                                             Config::kStripBytes);
  const uint64_t b =
      back_descriptor<kPiece>(stages_address + shape.first_strip(warpgroup) * Config::kStripBytes, Config::kStripBytes);
  back_mainloop<Config, kQuads>(accumulator, barriers, at, stages, stage_bytes, a, b, item.last_step - item.first_step);

  const BackEpilogue<Config> epilogue(params.epilogue, destination, shape.transposed);
  if (item.last_wave_tile < 0) {
    back_store(accumulator, epilogue);
    return;
  }
  const int64_t warpgroup_size = back_partial_floats(largest_quads) / 4;
  const BackPartial<Config> partial{
      params.partials + (int64_t(item.last_wave_tile) * schedule.splits * kBackWarpgroups + warpgroup) * warpgroup_size,
      kBackWarpgroups * warpgroup_size,
      params.counters + item.last_wave_tile * kBackWarpgroups + warpgroup,
      params.ticket,
      schedule.splits,
      int(threadIdx.x % 128)};
  partial.write(accumulator, item.part);
  if (!partial.arrive(1 + warpgroup)) return;
  partial.reduce(kQuads, epilogue);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    block_task_back_sm90(const __grid_constant__ CUtensorMap input, const __grid_constant__ CUtensorMap output_gradient,
                         const BlockTaskBackSm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // other architectures of a build get an empty kernel, which nobody launches
  constexpr int kPiece = Config::kPiece;
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&input));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&output_gradient));
  }
  extern __shared__ uint8_t shared[];
  const uint32_t unaligned = cute::cast_smem_ptr_to_uint(shared);
  const uint32_t stages_address = (unaligned + Config::kAlignment - 1) / Config::kAlignment * Config::kAlignment;
  uint8_t* stages_base = shared + (stages_address - unaligned);
  auto& barriers = *reinterpret_cast<typename Config::Barriers*>(stages_base + Config::kStagesBytes);

  const int4 header = __ldg(reinterpret_cast<const int4*>(params.work));
  const int tiles = header.x, stage_bytes = header.y * Config::kStripBytes, largest_quads = header.z;
  const int stages = min(Config::kMaxStages, Config::kStagesBytes / max(stage_bytes, 1));
  if (threadIdx.x == 0) barriers.initialize(stages, BackLoader<Config>::kLoadingWarps, 4 * kBackWarpgroups);
  __syncthreads();

  const BackSchedule schedule(params.work, tiles, gridDim.x, params.tokens, Config::kStageTokens, kPiece,
                              params.may_split);
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == kBackWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoadingRegisters>();
    const BackLoader<Config> loader{&input, &output_gradient, params.work};
    const int thread = threadIdx.x % 128;
    if constexpr (Config::kPaced) {
      // The warp with the fewest strips holds back for all: the others wait for stages with it.
      BackPace pace(params.progress, params.ticket,
                    thread / 32 == BackLoader<Config>::kLoadingWarps - 1 ? params.window : 0);
      loader.run(schedule, barriers, stages_base, stages, stage_bytes, thread, pace);
      pace.finish();
    } else {
      loader.run(schedule, barriers, stages_base, stages, stage_bytes, thread);
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
      const auto compute = [&](auto quads) {
        back_compute<Config, decltype(quads)::value>(params, schedule, item, shape, params.work + entry.x,
                                                     largest_quads, barriers, at, stages_address, stages, stage_bytes,
                                                     warpgroup);
      };
      // Straight-line code for each width: a run-time width inside the WGMMA batch would serialise it.
      switch (shape.quads(warpgroup, kPiece)) {
        case 0:
          back_skip<Config>(barriers, at, stages, item.last_step - item.first_step);
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
    }
  }
#endif
}

}  // namespace block_sparse
