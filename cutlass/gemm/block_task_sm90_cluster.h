// dense x sparse -> dense for Hopper (sm_90a), blocks whose sides are multiples of 32 or 16, both directions by one
// template. As block_task_sm90.h, with two differences. The 64 features of an instruction are a quarter of a group:
// lines of 32 or 16, whose pieces lie side by side, zeros where a block is absent. And a cluster of two thread blocks
// computes a tile of 256 features x 256 tokens and shares the tokens that both need: blocks are so small that the
// tokens are most of what is read.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>

#include "gemm/sm90_cluster_mainloop.h"

namespace block_sparse::sm90 {

template <class Element_, int kSide, bool kTransposed_>
struct ClusterTaskConfig {
  using Element = Element_;
  using Work = ClusterWork<kSide>;
  using Store = DeferredStore<Element, kSide>;
  static constexpr bool kTransposed = kTransposed_;  // input gradient
  static constexpr MajorMode kMajorA = kTransposed ? MajorMode::MN : MajorMode::K;
  static constexpr int kPieceSide = kSide;
  static constexpr int kTokens = 256;
  static constexpr int kInputBoxTokens = kTokens / Work::kRanks;
  static constexpr int kStoreTokens = Store::kPassTokens;  // of a box of the output
  static constexpr int64_t kStripTiles = 4;                // of 1, 2, 4 and 8, measured on the H200
  static constexpr int kStages = 4;
  static constexpr int kLoaders = 1 + Work::kHalves;
  static constexpr int kThreads = 128 * (1 + Work::kHalves);
  static constexpr uint32_t kInputBytes = kTokens * kChunk * sizeof(Element);
  static constexpr uint32_t kPieceBytes = kSide * kSide * sizeof(Element);
  // Registers a thread: what the loading warps give back, the multiplying ones get.
  static constexpr int kLoaderRegisters = 56;
  static constexpr int kMultiplierRegisters = 224;

  struct SharedStorage {
    alignas(1024) Element pieces[kStages][Work::kHalves][Work::kMaskBits][kSide * kSide];
    alignas(1024) Element input[kStages][kTokens * kChunk];  // (TOKENS, K)
    typename Store::Staging staging[Work::kHalves];
    RingBarriers<kStages> ring;
    EmptyBarrier box_full;
    EmptyBarrier box_empty;
    TileBox<Work> box;
    TileRelay<kStages + 2> relay;
    ClusterControl control[kStages];
  };
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    cluster_block_task(const __grid_constant__ CUtensorMap input_map,   // [T, K], boxes of 128 x 64
                       const __grid_constant__ CUtensorMap values_map,  // [nnz * bh, bw], boxes of a piece
                       const __grid_constant__ CUtensorMap output_map,  // [T, features], boxes of 64 x a line
                       const TaskParams<typename Config::Work> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Work = typename Config::Work;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int rank = int(cute::block_rank_in_cluster());
  if (threadIdx.x == 0) {
    shared.box_full.init(1);
    shared.box_empty.init(Config::kLoaders);
    shared.relay.initialize();
    constexpr int kMultiplierWarps = 4 * Work::kHalves;
    shared.ring.initialize(Config::kStages, Config::kLoaders, kMultiplierWarps * Work::kRanks);
  }
  __syncwarp();
  cute::cluster_sync();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoaderRegisters>();
    if (warp == 0) {
      load_cluster_tokens<Config>(shared, params.work, &input_map, rank, lane);
    } else if (warp < Config::kLoaders) {
      const int half = warp - 1;
      load_cluster_pieces<Config>(shared, params.work, &values_map, params.pieces_per_row, rank * Work::kHalves + half,
                                  half, lane);
    } else {
      schedule_cluster_tiles(shared, params.raster, params.work, params.counter, rank, lane);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kMultiplierRegisters>();
    const auto* bias = static_cast<const typename Config::Element*>(params.bias);
    const int half = warp / 4 - 1;
    multiply_cluster_tiles<Config>(
        shared, params.raster, params.work, &output_map, params.features, rank * Work::kHalves + half, half,
        threadIdx.x % 128, [=](int feature) { return bias ? float(bias[feature]) : 0.0f; }, params.activation);
  }
  __syncwarp();
  cute::cluster_sync();  // the other thread block may still copy into ours, and signal our barriers
#endif
}

}  // namespace block_sparse::sm90
