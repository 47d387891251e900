// dense x sparse -> dense for Hopper (sm_90a), blocks whose sides are multiples of 64, both directions by one template:
// the copy engine (TMA) loads, warpgroup matrix instructions (WGMMA) multiply, every thread block lives as long as the
// launch.
//
//   forward         y  [T, O] = x [T, I] Wᵀ   lines are strips of 64 output features, chunks strips of 64 inputs
//   input gradient  dx [T, I] = dy [T, O] W   the same with I and O exchanged
//
// The product is computed as yᵀ: features are the instruction's M, so that a piece of W, K-major forward and MN-major
// for the input gradient, is operand A as it lies in memory, and 256 tokens are its N. A thread block's tile is 128
// features (a group of two lines) x 256 tokens. One warpgroup per line multiplies; of the fourth part, three warps load
// and one fetches the next tile. With fewer than 256 tokens boxes have only their rows, and what a stage held before is
// multiplied for the rest: it reaches only columns of the instruction that are never stored.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "gemm/sm90_mainloop.h"

namespace block_sparse::sm90 {

template <class Element_, bool kTransposed_>
struct BlockTaskConfig {
  using Element = Element_;
  using Work = WideWork;
  static constexpr int kGroupLines = Work::kGroupLines;
  static constexpr bool kTransposed = kTransposed_;  // input gradient
  static constexpr MajorMode kMajorA = kTransposed ? MajorMode::MN : MajorMode::K;
  static constexpr int kPieceSide = kChunk;
  static constexpr int kTokens = 256;
  static constexpr int kStoreTokens = DeferredStore<Element>::kPassTokens;  // of a box of the output
  // Token tiles of a strip, measured on the H200: forward gains from reusing pieces over a few of them; the input
  // gradient is fastest when all thread blocks read one token tile, because dy is long.
  static constexpr int64_t kStripTiles = kTransposed ? 1 : 4;
  static constexpr int kStages = 4;
  static constexpr int kLoaders = 1 + kGroupLines;
  static constexpr int kThreads = 128 * (1 + kGroupLines);
  static constexpr uint32_t kTokenBytes = kChunk * sizeof(Element);  // of one token in a stage
  static constexpr uint32_t kPieceBytes = kChunk * kChunk * sizeof(Element);
  // Registers a thread: what the loading warps give back, the multiplying ones get.
  static constexpr int kLoaderRegisters = 56;
  static constexpr int kMultiplierRegisters = 224;

  struct SharedStorage {
    alignas(1024) Element pieces[kStages][kGroupLines][kChunk * kChunk];
    alignas(1024) Element input[kStages][kTokens * kChunk];  // (TOKENS, K)
    typename DeferredStore<Element>::Staging staging[kGroupLines];
    RingBarriers<kStages> ring;
    EmptyBarrier box_full;
    EmptyBarrier box_empty;
    TileBox<WideWork> box;
    int control[kStages];
  };
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    block_task(const __grid_constant__ CUtensorMap input_map,   // [T, K], boxes of min(T, 256) x 64
               const __grid_constant__ CUtensorMap values_map,  // [nnz * bh, bw], boxes of 64 x 64
               const __grid_constant__ CUtensorMap output_map,  // [T, features], boxes of min(T, 64) x 64
               const TaskParams<WideWork> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const WideWork& work = params.work;
  if (threadIdx.x == 0) {
    shared.box_full.init(1);
    shared.box_empty.init(Config::kLoaders);
    constexpr int kMultiplierWarps = 4 * Config::kGroupLines;
    shared.ring.initialize(Config::kStages, Config::kLoaders, kMultiplierWarps);
  }
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoaderRegisters>();
    if (warp < Config::kLoaders) {
      load_tiles<Config>(shared, work, &input_map, &values_map, params.raster, params.pieces_per_row, warp, lane);
    } else {
      schedule_tiles(shared, params.raster, work, params.counter, lane);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kMultiplierRegisters>();
    const auto* bias = static_cast<const typename Config::Element*>(params.bias);
    multiply_tiles<Config>(
        shared, params.raster, work, &output_map, params.features, warp / 4 - 1, threadIdx.x % 128,
        [=](int feature) { return bias ? float(bias[feature]) : 0.0f; }, params.activation);
  }
#endif
}

}  // namespace block_sparse::sm90
