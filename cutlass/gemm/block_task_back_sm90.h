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

// x [T, I] and dy [T, O] with boxes of one strip, of as many tokens as a short stage has, or a long one.
struct BackOperandMaps {
  CUtensorMap input[2];
  CUtensorMap output_gradient[2];
};

struct BlockTaskBackSm90Params {
  const int32_t* work;  // the list
  int tokens;           // T
  bool may_split;       // the workspace below is there
  float4* partials;     // partial sums
  uint64_t* counters;   // [thread blocks, 2], anything
  uint64_t ticket;      // of this launch, 56 bits
  BackEpilogueParams epilogue;
  uint32_t* progress;  // of the thread blocks, anything; only if kPaced
  int window;          // how far they may be apart, in tokens
};

// `kPaced_`: thread blocks stay within a window of tokens of each other.
template <class Element_, class Result_, int kPiece_, bool kPaced_>
struct BlockTaskBackSm90Config {
  using Element = Element_;
  using Result = Result_;
  static constexpr int kPiece = kPiece_;
  static constexpr bool kPaced = kPaced_;
  static constexpr int kFragmentColumns = kPiece == 64 ? 32 : 16;  // of the epilogue
  using Barriers = RingBarriers<kBackMaxStages>;
  struct Control {  // behind the stages
    Barriers barriers;
    uint32_t claimed[kBackWarpgroups];  // BackPartial::claim
  };
  static constexpr int kAlignment = 1024;  // of the 128-byte swizzle
  static constexpr int kSharedBytes = kAlignment + kBackRingBytes + int(sizeof(Control));
  static constexpr int kThreads = 128 * (kBackWarpgroups + 1);
  // Together no more than what the kernel starts with, 168 a thread: else its start waits for ever.
  static constexpr int kLoadingRegisters = kPaced ? 40 : 24;
  static constexpr int kComputingRegisters = kPaced ? 232 : 240;
};

// One tile, or one token range of it, by one warpgroup: to blocks of dW, or to partial sums.
template <class Config, int kQuads, class MakePartial>
CUTE_DEVICE void back_compute(const BackItem& item, typename Config::Barriers& barriers, RingPosition& at,
                              const BackStages& stages, uint32_t a, uint32_t b, const MakePartial& partial,
                              const BackEpilogueParams& params, const BackDestination<Config>& destination,
                              bool transposed) {
  float accumulator[32 * kQuads];
  const int steps = item.last_step - item.first_step;
  if (kQuads <= kBackLongStageQuads && stages.tokens == back_stage_tokens(true)) {
    back_mainloop<Config, kQuads, back_stage_tokens(true)>(accumulator, barriers, at, stages, a, b, steps);
  } else {
    back_mainloop<Config, kQuads, back_stage_tokens(false)>(accumulator, barriers, at, stages, a, b, steps);
  }
  if (item.last_wave_tile < 0) {
    back_store(accumulator, BackEpilogue<Config>(params, destination, transposed));
  } else {
    partial().write(accumulator);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    block_task_back_sm90(const __grid_constant__ BackOperandMaps maps, const BlockTaskBackSm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // other architectures of a build get an empty kernel, which nobody launches
  constexpr int kPiece = Config::kPiece;
  if (threadIdx.x < 2) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&maps.input[threadIdx.x]));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&maps.output_gradient[threadIdx.x]));
  }
  extern __shared__ uint8_t shared[];
  const uint32_t unaligned = cute::cast_smem_ptr_to_uint(shared);
  const uint32_t stages_address = (unaligned + Config::kAlignment - 1) / Config::kAlignment * Config::kAlignment;
  uint8_t* stages_base = shared + (stages_address - unaligned);
  auto& control = *reinterpret_cast<typename Config::Control*>(stages_base + kBackRingBytes);
  auto& barriers = control.barriers;

  const int4 header = __ldg(reinterpret_cast<const int4*>(params.work));
  const int tiles = header.x, stage_strips = header.y, largest_quads = header.z;
  const bool long_stages = header.w != 0;
  BackStages stages;
  stages.tokens = back_stage_tokens(long_stages);
  stages.strip_bytes = stages.tokens * kPiece * 2;
  stages.bytes = max(stage_strips, 1) * stages.strip_bytes;
  stages.count = back_stage_count(stages.bytes);
  if (threadIdx.x == 0) barriers.initialize(stages.count, BackLoader<Config>::kLoadingWarps, 4 * kBackWarpgroups);
  __syncthreads();

  const BackSchedule schedule(params.work, tiles, gridDim.x, params.tokens, stages.tokens, kPiece, params.may_split);
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == kBackWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoadingRegisters>();
    const BackLoader<Config> loader{&maps.input[long_stages], &maps.output_gradient[long_stages], params.work};
    const int thread = threadIdx.x % 128;
    if constexpr (Config::kPaced) {
      // The warp with the fewest strips holds back for all: the others wait for stages with it.
      const bool paces = thread / 32 == BackLoader<Config>::kLoadingWarps - 1;
      BackPace pace(params.progress, params.ticket, paces ? max(params.window / stages.tokens, 2 * kBackPaceSteps) : 0);
      loader.run(schedule, barriers, stages_base, stages, thread, pace);
      pace.finish();
    } else {
      loader.run(schedule, barriers, stages_base, stages, thread);
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
      const int quads = shape.quads(warpgroup, kPiece);
      const BackDestination<Config> destination(params.work + entry.x, shape, warpgroup, params.epilogue.cell);
      const int first_strip = shape.first_strip(warpgroup), first_line = shape.first_line(warpgroup, kPiece);
      const uint32_t a = back_operand_place(stages_address + first_line * stages.strip_bytes, stages.strip_bytes);
      const uint32_t b = back_operand_place(stages_address + first_strip * stages.strip_bytes, stages.strip_bytes);
      const bool cut = item.last_wave_tile >= 0 && quads > 0;
      // Made anew where it is needed: no register is to hold it during the products.
      const auto partial = [&] {
        const int first_part = item.last_wave_tile * schedule.splits * kBackWarpgroups + warpgroup;
        const int part_size = int(back_partial_floats(largest_quads) / 4);
        return BackPartial<Config>{params.partials + int64_t(first_part) * part_size,
                                   kBackWarpgroups * part_size,
                                   params.counters + first_part,
                                   params.ticket,
                                   schedule.splits,
                                   item.part,
                                   quads,
                                   int(threadIdx.x % 128)};
      };
      if (cut) partial().prepare();
      const auto compute = [&](auto count) {
        back_compute<Config, decltype(count)::value>(item, barriers, at, stages, a, b, partial, params.epilogue,
                                                     destination, shape.transposed);
      };
      // Straight-line code for each width: a run-time width inside the WGMMA batch would serialise it.
      switch (quads) {
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
      if (cut) {
        const BackPartial<Config> sums = partial();
        sums.reduce(sums.claim(1 + warpgroup, control.claimed[warpgroup]),
                    BackEpilogue<Config>(params.epilogue, destination, shape.transposed));
      }
    }
  }
#endif
}

}  // namespace block_sparse
