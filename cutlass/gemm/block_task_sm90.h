// dense x sparse -> dense for Hopper (sm_90a), blocks whose sides are multiples of 16, both directions and all sizes by
// one template: the copy engine (TMA) loads, warpgroup matrix instructions (WGMMA) multiply, every thread block lives
// as long as the launch.
//
//   forward         y  [T, O] = x [T, I] Wᵀ   lines are strips of 64, 32 or 16 output features, chunks strips of inputs
//   input gradient  dx [T, I] = dy [T, O] W   the same with I and O exchanged
//
// The product is computed as yᵀ: features are the instruction's M, so that pieces of W, K-major forward and MN-major
// for the input gradient, are operand A as they lie in memory, and 256 tokens are its N. A thread block's tile is 128
// features (a group) x 256 tokens. One warpgroup multiplies each half of 64 features: one line, or two or four side by
// side, where an absent block next to a present one counts as zeros. Of the fourth part, three warps load and one
// fetches the next tile. With fewer than 256 tokens boxes have only their rows, and what a stage held before is
// multiplied for the rest: it reaches only columns of the instruction that are never stored.
//
// Two thread blocks may be a cluster: then a group is 256 features, 128 of each, and either loads half of the tokens
// into the shared memory of both. A stage is empty when both have let go of it; the rest they do side by side.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "gemm/sm90_mainloop.h"
#include "gemm/sm90_piece_boxes.h"
#include "gemm/sm90_piece_copy.h"

namespace block_sparse::sm90 {

// `kStoreTokens`: of a pass of the epilogue, and of a box of the output; 64 or 128.
template <class Element_, class Work_, bool kTransposed_, int kStoreTokens_>
struct BlockTaskConfig {
  using Element = Element_;
  using Work = Work_;
  using Store = DeferredStore<Element, Work::kSide, kStoreTokens_>;
  static constexpr int kStoreTokens = kStoreTokens_;
  static constexpr bool kTransposed = kTransposed_;  // input gradient
  static constexpr MajorMode kMajorA = kTransposed ? MajorMode::MN : MajorMode::K;
  static constexpr int kCluster = Work::kCluster;  // thread blocks that compute a tile and share its tokens
  static_assert(kCluster == 1 || kCluster == 2);
  // With ordinary copies: the copy engine has time for boxes of 32 only where it loads half of the tokens.
  static constexpr bool kCopiesPieces = Work::kSide < 64 && kCluster == 1;
  static constexpr int kTokens = 256;
  // What a thread block loads of a tile's tokens: share_tokens from rank * share_step on. A step is whole periods of
  // the swizzle, and shares overlap rather than pass the tile's end: rows out of range take long.
  static CUTE_HOST_DEVICE int share_step(int tile_tokens) { return tile_tokens / kCluster / 8 * 8; }
  static CUTE_HOST_DEVICE int share_tokens(int tile_tokens) {
    return tile_tokens - (kCluster - 1) * share_step(tile_tokens);
  }
  // Token tiles of a strip, measured on the H200: forward gains from reusing pieces over a few of them; the input
  // gradient is fastest when all thread blocks read one token tile, because dy is long.
  static constexpr int64_t kStripTiles = kTransposed ? 1 : 4;
  static constexpr int kStages = 4;
  // A tile may be of one stage; multiplying warps may be done with one that they let go of, the loading warps at the
  // next but three, and the scheduling warp two further on.
  static constexpr int kTileOutputs = kStages + 3;
  static constexpr int kLoaders = 1 + kHalves;                                  // warps
  static constexpr int kFullArrivals = 1 + kHalves * (kCopiesPieces ? 32 : 1);  // of a stage
  static constexpr int kThreads = 128 * (1 + kHalves);
  static constexpr uint32_t kPieceBytes = Work::kSide * Work::kSide * sizeof(Element);
  // Registers a thread: what the loading warps give back, the multiplying ones get.
  static constexpr int kLoaderRegisters = kCopiesPieces ? 72 : 56;
  static constexpr int kMultiplierRegisters = kCopiesPieces ? 216 : 224;

  struct SharedStorage {
    // (FEATURES, K) forward, (K, FEATURES) for the input gradient: pieces by part, then line.
    alignas(1024) Element pieces[kStages][kHalves][kHalfOutputs * kItemInputs];
    alignas(1024) Element input[kStages][kTokens * kItemInputs];  // (TOKENS, K) a chunk
    typename Store::Staging staging[kHalves];
    RingBarriers<kStages> ring;
    EmptyBarrier box_full;
    EmptyBarrier box_empty;
    [[no_unique_address]] std::conditional_t<kCluster == 1, NoRelay, TileRelay<kStages>> relay;
    TileBox<Work> box;
    StageControl control[kStages];
    TileOutput<Element, Work> outputs[kTileOutputs];
    typename Store::Features store_features[kHalves];
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    block_task(const __grid_constant__ CUtensorMap input_map,   // [T, K], boxes of a share x a chunk
               const __grid_constant__ CUtensorMap pair_map,    // the same, boxes as wide as an item
               const __grid_constant__ CUtensorMap values_map,  // [nnz * bh, bw], boxes of a piece; if any
               const __grid_constant__ CUtensorMap output_map,  // [T, features], boxes of min(T, kStoreTokens) x a line
               const TaskParams<typename Config::Work> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.box_full.init(1);
    shared.box_empty.init(Config::kLoaders);
    constexpr int kMultiplierWarps = 4 * kHalves;
    shared.relay.initialize();
    shared.ring.initialize(Config::kStages, Config::kFullArrivals, Config::kCluster * kMultiplierWarps);
  }
  int rank = 0;  // within the cluster
  if constexpr (Config::kCluster == 1) {
    __syncthreads();
  } else {
    rank = cute::block_rank_in_cluster();
    cute::cluster_sync();
  }

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoaderRegisters>();
    if (warp == 0) {
      load_tokens<Config>(shared, params, &input_map, &pair_map, rank, lane);
    } else if (warp < Config::kLoaders) {
      load_pieces<Config>(shared, params, &values_map, warp - 1, rank, lane);
    } else {
      schedule_tiles<Config>(shared, params, rank, lane);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kMultiplierRegisters>();
    multiply_tiles<Config>(shared, params, &output_map, warp / 4 - 1, threadIdx.x % 128);
  }
  if constexpr (Config::kCluster > 1) {  // until it is here, the other one may arrive on our barriers
    __syncwarp();
    cute::cluster_sync();
  }
#endif
}

}  // namespace block_sparse::sm90
