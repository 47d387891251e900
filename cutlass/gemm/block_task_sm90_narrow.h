// dense x sparse -> dense for Hopper (sm_90a), blocks whose sides are multiples of 32 or 16, both directions by one
// template. As block_task_sm90.h, with the roles of the operands exchanged: tokens are the matrix instruction's M, read
// from registers, and a piece of W is its N, 32 or 16 wide. A thread block's tile is 128 tokens x 256 features (a group
// of lines); each of two warpgroups multiplies one half of the lines, and skips what is absent piece by piece.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "gemm/sm90_narrow_mainloop.h"

namespace block_sparse::sm90 {

template <class Element_, int kSide, bool kTransposed_>
struct NarrowTaskConfig {
  using Element = Element_;
  using Work = NarrowWork<kSide>;
  static constexpr bool kTransposed = kTransposed_;  // input gradient
  static constexpr MajorMode kMajorB = kTransposed ? MajorMode::MN : MajorMode::K;
  static constexpr int kPieceSide = kSide;
  static constexpr int kTokens = 128;
  static constexpr int kStoreTokens = 64;  // of a box of the output
  static constexpr int64_t kStripTiles = 4;
  static constexpr int kStages = 4;
  static constexpr int kLoaders = 1 + Work::kHalves;
  static constexpr int kThreads = 128 * (1 + Work::kHalves);
  static constexpr uint32_t kTokenBytes = kChunk * sizeof(Element);  // of one token in a stage
  static constexpr uint32_t kInputBytes = kTokens * kTokenBytes;
  static constexpr uint32_t kPieceBytes = kSide * kSide * sizeof(Element);
  // Registers a thread: what the loading warps give back, the multiplying ones get.
  static constexpr int kLoaderRegisters = 56;
  static constexpr int kMultiplierRegisters = 224;

  struct SharedStorage {
    alignas(1024) Element input[kStages][kTokens * kChunk];  // (TOKENS, K)
    alignas(1024) Element pieces[kStages][Work::kHalves][Work::kHalfLines * Work::kChunkParts][kSide * kSide];
    typename NarrowStore<NarrowTaskConfig>::Staging staging[Work::kHalves];
    RingBarriers<kStages> ring;
    EmptyBarrier box_full;
    EmptyBarrier box_empty;
    TileBox<Work> box;
    NarrowControl control[kStages];
  };
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    narrow_block_task(const __grid_constant__ CUtensorMap input_map,   // [T, K], boxes of min(T, 128) x 64
                      const __grid_constant__ CUtensorMap values_map,  // [nnz * bh, bw], boxes of a piece
                      const __grid_constant__ CUtensorMap output_map,  // [T, features], boxes of min(T, 64) x a line
                      const TaskParams<typename Config::Work> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.box_full.init(1);
    shared.box_empty.init(Config::kLoaders);
    constexpr int kMultiplierWarps = 4 * Config::Work::kHalves;
    shared.ring.initialize(Config::kStages, Config::kLoaders, kMultiplierWarps);
  }
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoaderRegisters>();
    if (warp < Config::kLoaders) {
      load_narrow_tiles<Config>(shared, params.work, &input_map, &values_map, params.raster, params.pieces_per_row,
                                warp, lane);
    } else {
      schedule_tiles(shared, params.raster, params.work, params.counter, lane);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kMultiplierRegisters>();
    using Element = typename Config::Element;
    const auto* bias = static_cast<const Element*>(params.bias);
    const auto read_bias = [=](int feature) {
      return bias ? float2{float(bias[feature]), float(bias[feature + 1])} : float2{0, 0};
    };
    multiply_narrow_tiles<Config>(shared, params.raster, params.work, &output_map, params.features, warp / 4 - 1,
                                  threadIdx.x % 128, read_bias, params.activation);
  }
#endif
}

}  // namespace block_sparse::sm90
