// dense x dense on sparse support -> blocks, for sm_80 and later (cp.async multistage, mma.sync).
//
//   weight gradient  dW [nnz, bh, bw] = dyᵀ x on the stored blocks   M runs along O, N along I, K along the tokens
//
// A thread block computes up to kGroup pieces of one block row: the slab of dy is shared, the slabs of x are gathered
// from wherever the pieces' columns are. Blocks are cut into square pieces of kUnit as in block_task.h.
#pragma once

#include "gemm/block_loader_dense.h"
#include "gemm/epilogue_function.h"
#include "gemm/grid_raster.h"
#include "gemm/thread_accumulator.h"

namespace block_sparse {

struct BlockTaskBackParams {
  const int32_t* crow_indices;  // [R + 1]
  const int32_t* col_indices;   // [nnz]
  const int32_t* row_slots;     // [nnz]
  int64_t rows;                 // R
  int64_t nnz;
  int block_height;             // bh
  int block_width;              // bw
  int64_t tokens;               // T
  int64_t split_tokens;         // tokens of one split, a multiple of the stage
  int out_features;             // O
  int in_features;              // I
  const void* output_gradient;  // dy [T, O]
  int64_t output_gradient_stride;
  const void* input;  // x [T, I]
  int64_t input_stride;
  void* result;                  // [splits, nnz, bh, bw]
  bool result_float32;           // else of the operands' type
  bool accumulate;               // adds to the result
  bool output_gradient_aligned;  // 16-byte vectors
  bool input_aligned;
  bool result_aligned;
};

template <class Math_, int kUnit_, int kGroup_, int kWarpsM_, int kStageTokens_, int kStages_, int kMinBlocks_>
struct BlockTaskBackConfig {
  using Math = Math_;
  using Element = typename Math::Element;
  using Operand = typename Math::Operand;
  static constexpr int kUnit = kUnit_;
  static constexpr int kGroup = kGroup_;
  static constexpr int kM = kUnit;
  static constexpr int kN = kUnit * kGroup;
  static constexpr int kK = kStageTokens_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarps = 4;
  static constexpr int kWarpsM = kWarpsM_;
  static constexpr int kWarpsN = kWarps / kWarpsM;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinBlocks = kMinBlocks_;  // thread blocks per multiprocessor
  static constexpr int kWarpM = kM / kWarpsM;
  static constexpr int kWarpN = kN / kWarpsN;
  using Raster = RowEntryRaster<kGroup>;
  using LayoutA = SharedLayout<Operand, Major::kMN, kM, kK, kStages>;  // (M, TOKENS, STAGES)
  using LayoutB = SharedLayout<Operand, Major::kMN, kN, kK, kStages>;  // (N, TOKENS, STAGES)
  using Accumulator = ThreadAccumulator<Math, kWarpM, kWarpN, Major::kMN, Major::kMN>;
  using Staging = EpilogueStaging<kWarpM, kWarpN>;

  struct SharedStorage {
    union {
      struct {
        alignas(128) Element a[cute::cosize_v<LayoutA>];
        alignas(128) Element b[cute::cosize_v<LayoutB>];
      } stages;
      alignas(128) float staging[kWarps][Staging::kFloats];
    };
    int64_t piece_result[kGroup];  // element offset of a piece in the result
    int piece_column[kGroup];      // its first column of x
  };
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    block_task_back(const __grid_constant__ BlockTaskBackParams params) {
  using namespace cute;
  using Element = typename Config::Element;
  using Operand = typename Config::Operand;
  constexpr int kUnit = Config::kUnit;
  constexpr int kStages = Config::kStages;

  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int thread = threadIdx.x;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int lane = thread % 32;

  // A piece row is kUnit rows of a block row; its entries are the block row's, cut along the width.
  const int piece_rows = params.block_height / kUnit;
  const int piece_columns = params.block_width / kUnit;
  typename Config::Raster raster{params.rows * piece_rows, params.nnz * piece_rows * piece_columns};
  auto tile = raster.find(blockIdx.x, lane, [&](int64_t piece_row) {
    int64_t row = piece_row / piece_rows;
    int64_t before = int64_t(params.crow_indices[row]) * piece_rows;
    int part = int(piece_row % piece_rows);
    if (part > 0) before += int64_t(part) * (params.crow_indices[row + 1] - params.crow_indices[row]);
    return before * piece_columns;
  });
  if (tile.count == 0) return;
  const int first_row = int(tile.row) * kUnit;  // of dy's features

  if (thread < tile.count) {
    int64_t piece = tile.first + thread;
    int64_t entry = params.crow_indices[tile.row / piece_rows] + piece / piece_columns;
    int64_t column_in_block = piece % piece_columns * kUnit;
    int64_t row_in_block = tile.row % piece_rows * kUnit;
    shared.piece_column[thread] = params.col_indices[entry] * params.block_width + int(column_in_block);
    shared.piece_result[thread] =
        (int64_t(params.row_slots[entry]) * params.block_height + row_in_block) * params.block_width + column_in_block;
  }
  __syncthreads();

  auto mA = make_tensor(make_smem_ptr(reinterpret_cast<const Operand*>(shared.stages.a)), typename Config::LayoutA{});
  auto mB = make_tensor(make_smem_ptr(reinterpret_cast<const Operand*>(shared.stages.b)), typename Config::LayoutB{});

  const int64_t first_token = blockIdx.y * params.split_tokens;
  const int64_t end_token = min(params.tokens, first_token + params.split_tokens);
  const int stages = int((end_token - first_token + Config::kK - 1) / Config::kK);
  const int last_tokens = int(end_token - first_token - int64_t(stages - 1) * Config::kK);  // tokens of the last stage

  using LoaderA = FeatureTileLoader<Element, typename Config::LayoutA, Config::kM, Config::kK, Config::kThreads>;
  using LoaderB = FeatureTileLoader<Element, typename Config::LayoutB, Config::kN, Config::kK, Config::kThreads>;
  LoaderA loader_a(static_cast<const Element*>(params.output_gradient), params.output_gradient_stride, first_token,
                   first_row + LoaderA::feature_of(thread), params.out_features, true, params.output_gradient_aligned,
                   thread);
  const int piece = LoaderB::feature_of(thread) / kUnit;
  const bool used = piece < tile.count;
  LoaderB loader_b(static_cast<const Element*>(params.input), params.input_stride, first_token,
                   used ? shared.piece_column[piece] + LoaderB::feature_of(thread) % kUnit : 0, params.in_features,
                   used, params.input_aligned, thread);

  int loaded = 0;
  int load_buffer = 0;
  auto load_next_stage = [&] {
    if (loaded < stages) {
      int tokens = loaded + 1 < stages ? Config::kK : last_tokens;
      loader_a.load_next(shared.stages.a + load_buffer * Config::kM * Config::kK, tokens);
      loader_b.load_next(shared.stages.b + load_buffer * Config::kN * Config::kK, tokens);
    }
    cp_async_fence();
    ++loaded;
    load_buffer = load_buffer + 1 == kStages ? 0 : load_buffer + 1;
  };
  for (int stage = 0; stage < kStages - 1; ++stage) load_next_stage();

  typename Config::Accumulator accumulator;
  const int warp_m = warp / Config::kWarpsN;
  const int warp_n = warp % Config::kWarpsN;
  const bool warp_used = warp_n * Config::kWarpN < tile.count * kUnit;
  int buffer = 0;
  for (int stage = 0; stage < stages; ++stage) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // this stage has arrived, the previous one is free
    auto warp_a = local_tile(mA(_, _, buffer), Shape<Int<Config::kWarpM>, Int<Config::kK>>{}, make_coord(warp_m, _0{}));
    auto warp_b = local_tile(mB(_, _, buffer), Shape<Int<Config::kWarpN>, Int<Config::kK>>{}, make_coord(warp_n, _0{}));
    if (warp_used) {
      accumulator.add_product(warp_a, warp_b, lane);
    }
    buffer = buffer + 1 == kStages ? 0 : buffer + 1;
    load_next_stage();
  }
  __syncthreads();  // the stages' memory becomes staging memory

  constexpr int kVector = 16 / int(sizeof(Element));
  const int64_t split_result = int64_t(blockIdx.y) * params.nnz * params.block_height * params.block_width;
  Config::Staging::template for_each_vector<kVector>(
      accumulator, shared.staging[warp], lane, [&](int row, int column, float (&values)[kVector]) {
        int m = warp_m * Config::kWarpM + row;
        int n = warp_n * Config::kWarpN + column;
        if (n / kUnit >= tile.count) return;
        // Exactly zero past the edges, whatever the other operand holds there.
        int valid = first_row + m < params.out_features
                        ? valid_elements<kVector>(shared.piece_column[n / kUnit] + n % kUnit, params.in_features)
                        : 0;
        CUTE_UNROLL
        for (int i = 0; i < kVector; ++i) values[i] = i < valid ? values[i] : 0.f;
        int64_t at = split_result + shared.piece_result[n / kUnit] + int64_t(m) * params.block_width + n % kUnit;
        const auto store = [&](auto* result) {
          if (params.accumulate) add_vector(result, values, params.result_aligned);
          store_vector(result, values, kVector, params.result_aligned);
        };
        if (params.result_float32) {
          store(static_cast<float*>(params.result) + at);
        } else {
          store(static_cast<Element*>(params.result) + at);
        }
      });
}

// Sums the splits' partial results in order, so that the result does not depend on timing.
template <class Output>
__global__ void __launch_bounds__(256) reduce_splits(const float* partial,  // [splits, elements]
                                                     Output* result,        // [elements]
                                                     int64_t elements, int splits, bool accumulate) {
  int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step) {
    float sum = 0.f;
    for (int split = 0; split < splits; ++split) sum += partial[split * elements + i];
    if (accumulate) sum += float(result[i]);
    result[i] = Output(sum);
  }
}

}  // namespace block_sparse
