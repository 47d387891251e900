// dense x sparse -> dense, both directions by one template, for sm_80 and later (cp.async multistage, mma.sync).
//
//   forward         y  [T, O] = x [T, I] Wᵀ   lines are block rows,    N runs along O, K along I
//   input gradient  dx [T, I] = dy [T, O] W   lines are block columns, N runs along I, K along O
//
// A thread block computes kTokens tokens x kLines lines. Blocks are cut into square pieces of kUnit (the largest of
// 16, 32, 64, 128 that divides both sides), so that one kernel serves every shape with such sides.
#pragma once

#include "gemm/block_loader_dense.h"
#include "gemm/block_loader_sparse.h"
#include "gemm/epilogue_function.h"
#include "gemm/grid_raster.h"
#include "gemm/index_ring.h"
#include "gemm/thread_accumulator.h"

namespace block_sparse {

struct BlockTaskParams {
  StripRaster raster;
  LineIndex index;
  const int32_t* line_order;  // [lines] or null: lines in the order in which groups take them
  int lines;                  // block rows (forward) or block columns
  int64_t block_elements;     // bh * bw
  int block_width;            // bw
  int pieces_n;               // pieces of a block along N
  int block_k;                // side of a block along K
  int chunks_per_block;       // along K
  int64_t tokens;             // T
  int extent_n;               // O (forward) or I
  int extent_k;               // I (forward) or O
  const void* input;          // [T, extent_k]
  int64_t input_stride;
  const void* values;  // [nnz, bh, bw]
  const void* bias;    // [extent_n] or null
  void* output;        // [T, extent_n]
  EpilogueActivation activation;
  bool input_aligned;  // 16-byte vectors of the input, of values, of the output
  bool values_aligned;
  bool output_aligned;
};

template <class Math_, int kUnit_, bool kTransposed_, int kTokens_, int kLines_, int kWarpsN_, int kStageBytes,
          int kStages_>
struct BlockTaskConfig {
  using Math = Math_;
  using Element = typename Math::Element;
  using Operand = typename Math::Operand;
  static constexpr int kUnit = kUnit_;
  static constexpr bool kTransposed = kTransposed_;  // input gradient
  static constexpr int kTokens = kTokens_;
  static constexpr int kLines = kLines_;
  static constexpr int kN = kLines * kUnit;
  static constexpr int kK = kStageBytes / int(sizeof(Element));  // inner extent of a stage
  static constexpr int kStages = kStages_;
  static constexpr int kWarps = 4;
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpM = kTokens * kWarpsN / kWarps;
  static constexpr int kWarpN = kN / kWarpsN;
  // Thread blocks per multiprocessor, as registers allow: one computes while another stores.
  static constexpr int kAccumulators = kWarpM * kWarpN * (Math::kTwoLevels ? 2 : 1);
  static constexpr int kMinBlocks = kAccumulators <= 32 * 64 ? 3 : 2;
  static constexpr int kChunk = kUnit < kK ? kUnit : kK;  // inner extent that one record supplies to a stage
  static constexpr int kChunks = kK / kChunk;
  // Inner extent of one test for an absent block: a chunk, where the registers hold its fragments.
  static constexpr int kSkipK = kChunk < 2 * Math::kInstructionK ? kChunk : 2 * Math::kInstructionK;
  static_assert(kLines == 1 || kWarpsN == 1, "absent blocks are skipped by all warps alike");

  static constexpr Major kMajorB = kTransposed ? Major::kMN : Major::kK;
  using LayoutA = SharedLayout<Operand, Major::kK, kTokens, kK, kStages>;  // (TOKENS, K, STAGES)
  using LayoutB = SharedLayout<Operand, kMajorB, kN, kK, kStages>;         // (N, K, STAGES)
  static constexpr int kStageA = kTokens * kK;
  static constexpr int kStageB = kN * kK;
  using Accumulator = ThreadAccumulator<Math, kWarpM, kWarpN, Major::kK, kMajorB>;
  using Staging = EpilogueStaging<kWarpM, kWarpN>;

  struct SharedStorage {
    union {
      struct {
        alignas(128) Element a[cute::cosize_v<LayoutA>];
        alignas(128) Element b[cute::cosize_v<LayoutB>];
      } stages;
      alignas(128) float staging[kWarps][Staging::kFloats];
    };
    IndexRing<kLines> ring;
    int32_t line_offset[kLines];  // element offset of a line's piece inside its blocks
    int32_t line_column[kLines];  // first output column of a line, or extent_n where there is none
  };
  // Records wanted by the stages up to the newest, those of the stage being read, and one window more, are alive.
  static_assert((kStages + 2) * kChunks + 2 + IndexRing<kLines>::kWindow <= IndexRing<kLines>::kCapacity);
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    block_task(const __grid_constant__ BlockTaskParams params) {
  using namespace cute;
  using Element = typename Config::Element;
  using Operand = typename Config::Operand;
  using Accumulator = typename Config::Accumulator;
  constexpr int kLines = Config::kLines;
  constexpr int kUnit = Config::kUnit;
  constexpr int kStages = Config::kStages;

  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int thread = threadIdx.x;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int lane = thread % 32;

  const auto tile = params.raster(blockIdx.x);
  const int64_t first_token = int64_t(tile.token_tile) * Config::kTokens;

  // Which block line, and which piece of it, line j of this group is.
  IndexProducer<kLines> producer{params.index, params.block_elements, params.block_k, shared.line_offset, 0, 0};
  if (warp == 0) {
    if (lane < kLines) {
      int piece_line = tile.line_group * kLines + lane;
      int line = piece_line / params.pieces_n;
      int piece = piece_line % params.pieces_n * kUnit;
      int column = params.extent_n;
      if (line < params.lines) {
        if (params.line_order != nullptr) line = params.line_order[line];
        producer.cursor = params.index.offsets[line];
        producer.end = params.index.offsets[line + 1];
        column = min(params.extent_n, line * params.pieces_n * kUnit + piece);
      }
      shared.line_column[lane] = column;
      shared.line_offset[lane] = Config::kTransposed ? piece : piece * params.block_width;
    }
    __syncwarp();
  }
  const int chunks_per_block = params.chunks_per_block;
  const int stage_records = Config::kChunks / chunks_per_block;  // what one stage advances a cursor by
  const int stage_parts = Config::kChunks % chunks_per_block;
  // Records to make ahead of the cursor of a stage, so that kStages stages from there on can be loaded.
  const int records_ahead = kStages * Config::kChunks / chunks_per_block + 2;
  if (warp == 0) {
    producer.produce(shared.ring, records_ahead, lane);
    if (lane == 0) shared.ring.produced[0] = producer.produced;
  }
  __syncthreads();

  auto mA = make_tensor(make_smem_ptr(reinterpret_cast<const Operand*>(shared.stages.a)), typename Config::LayoutA{});
  auto mB = make_tensor(make_smem_ptr(reinterpret_cast<const Operand*>(shared.stages.b)), typename Config::LayoutB{});

  TokenTileLoader<Element, typename Config::LayoutA, Config::kTokens, Config::kK, Config::kThreads> input_loader(
      static_cast<const Element*>(params.input), params.input_stride, first_token, params.tokens, params.input_aligned,
      thread);
  BlockLoader<Element, Config::kMajorB, typename Config::LayoutB, Config::kN, kUnit, Config::kK, Config::kChunk,
              Config::kThreads>
      block_loader(static_cast<const Element*>(params.values), params.block_width, params.values_aligned, thread);

  const int my_chunk = input_loader.column_in_tile / Config::kChunk;
  ChunkCursor input_cursor{my_chunk / chunks_per_block,
                           my_chunk % chunks_per_block};  // this thread's chunk of the next load
  ChunkCursor block_cursor{0, 0};                         // first chunk of the next load
  int load_buffer = 0;
  auto load_next_stage = [&](int records) {
    if (input_cursor.record < records) {
      int column = shared.ring.inner[shared.ring.index_of(input_cursor.record)] + input_cursor.part * Config::kChunk +
                   input_loader.column_in_tile % Config::kChunk;
      input_loader.load(shared.stages.a + load_buffer * Config::kStageA, column, params.extent_k);
    }
    block_loader.load(shared.stages.b + load_buffer * Config::kStageB, shared.ring,
                      Config::kTransposed ? block_cursor : input_cursor, records, chunks_per_block, params.extent_k);
    cp_async_fence();
    input_cursor.advance(stage_records, stage_parts, chunks_per_block);
    block_cursor.advance(stage_records, stage_parts, chunks_per_block);
    load_buffer = load_buffer + 1 == kStages ? 0 : load_buffer + 1;
  };
  for (int stage = 0; stage < kStages - 1; ++stage) load_next_stage(shared.ring.produced[0]);

  Accumulator accumulator;
  const int warp_m = warp / Config::kWarpsN;
  const int warp_n = warp % Config::kWarpsN;
  ChunkCursor cursor{0, 0};  // first chunk of the stage being multiplied
  int buffer = 0;
  int stage = 0;
  for (int parity = 0;; parity ^= 1) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // this stage has arrived, the previous one is free, the ring's new records are visible
    const int records = shared.ring.produced[parity];
    if (cursor.record >= records) break;

    uint32_t present[Config::kChunks];  // by chunk: bit j, line j has a block
    CUTE_UNROLL
    for (int c = 0; c < Config::kChunks; ++c) {
      present[c] = kLines > 1 && cursor.record < records ? shared.ring.present[shared.ring.index_of(cursor.record)] : 0;
      cursor.advance(0, 1, chunks_per_block);
    }
    // Two stages leave a load no time but this stage's products. With more of them the loads come last: finding their
    // addresses then overlaps the matrix instructions just issued.
    constexpr bool kLoadFirst = kStages == 2;
    if constexpr (kLoadFirst) load_next_stage(records);
    auto warp_a = local_tile(mA(_, _, buffer), Shape<Int<Config::kWarpM>, Int<Config::kK>>{}, make_coord(warp_m, _0{}));
    auto warp_b = local_tile(mB(_, _, buffer), Shape<Int<Config::kWarpN>, Int<Config::kK>>{}, make_coord(warp_n, _0{}));
    if constexpr (kLines == 1) {
      accumulator.add_product(warp_a, warp_b, lane);
    } else {
      accumulator.template add_product<kUnit, Config::kSkipK>(
          warp_a, warp_b, lane, [&](int k, int n) { return present[k / Config::kChunk] >> (n / kUnit) & 1; });
    }
    accumulator.end_stage(stage++);
    buffer = buffer + 1 == kStages ? 0 : buffer + 1;
    if constexpr (!kLoadFirst) load_next_stage(records);
    if (warp == 0) {
      producer.produce(shared.ring, cursor.record + records_ahead, lane);
      if (lane == 0) shared.ring.produced[parity ^ 1] = producer.produced;
    }
  }

  accumulator.finish();

  // The loop ends behind a barrier, and stages past the last load nothing: the stages' memory is free for staging.
  constexpr int kVector = 16 / int(sizeof(Element));
  // A lane's column is the same in every row.
  const int n = warp_n * Config::kWarpN + lane % (Config::kWarpN / kVector) * kVector;
  const int output_column = shared.line_column[n / kUnit] + n % kUnit;
  const int valid = valid_elements<kVector>(output_column, params.extent_n);
  float bias_values[kVector];
  CUTE_UNROLL
  for (int i = 0; i < kVector; ++i) {
    bias_values[i] =
        params.bias != nullptr && i < valid ? float(static_cast<const Element*>(params.bias)[output_column + i]) : 0.f;
  }
  const int64_t warp_token = first_token + warp_m * Config::kWarpM;
  auto* output = static_cast<Element*>(params.output) + warp_token * params.extent_n + output_column;
  const int rows = int(min(params.tokens - warp_token, int64_t(Config::kWarpM)));
  Config::Staging::template for_each_vector<kVector>(
      accumulator, shared.staging[warp], lane, [&](int row, int, float (&values)[kVector]) {
        if (row >= rows) return;
        apply_epilogue(values, bias_values, params.activation);
        store_vector(output + int64_t(row) * params.extent_n, values, valid, params.output_aligned);
      });
}

}  // namespace block_sparse
