// dense x sparse -> dense for few tokens, as in decoding: W is read once, at the speed of memory. For sm_80 and later.
//
//   forward         y  [T, O] = x [T, I] Wᵀ   lines are block rows,    features run along O, K along I
//   input gradient  dx [T, I] = dy [T, O] W   lines are block columns, features run along I, K along O
//
// A thread block computes a piece of 16, 32 or 64 features of one line for all tokens. Its warps share out the line's
// blocks; each streams its own (decode_stream.h), and their sums meet in shared memory (decode_epilogue.h).
#pragma once

#include "gemm/decode_epilogue.h"
#include "gemm/decode_stream.h"
#include "gemm/math_mode.h"

namespace block_sparse {

struct BlockTaskDecodeParams {
  int tiles;  // pieces of all lines
  LineIndex index;
  const int32_t* line_order;   // [lines] or null
  cutlass::FastDivmod warps;   // of a thread block
  cutlass::FastDivmod pieces;  // of a block along the features
  DecodeSteps steps;
  const void* values;  // [nnz, bh, bw]; 16-byte aligned
  uint32_t block_bytes;
  int block_width;      // bw
  DecodeTokens tokens;  // [T, K]; 16-byte aligned rows
  DecodeOutput output;
};

// kStages: of a warp's ring. kCacheTokens: the tokens come through the L1 cache. kResidentWarps: of a multiprocessor,
// for which the registers are to suffice.
template <class Math_, bool kTransposed_, int kRows_, int kTokenTiles_, int kStages_, bool kCacheTokens,
          int kResidentWarps_>
struct BlockTaskDecodeConfig {
  using Math = Math_;
  using Element = typename Math::Element;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kRows = kRows_;
  static constexpr int kTokenTiles = kTokenTiles_;
  static constexpr int kStages = kStages_;
  static constexpr int kMaxWarps = kResidentWarps_ % 16 == 0 ? 16 : 8;
  static constexpr int kMinBlocks = kResidentWarps_ / kMaxWarps;
  using Stream = DecodeStream<Element, kTransposed, kRows, kTokenTiles, kStages, kCacheTokens>;
  using Epilogue = DecodeEpilogue<Element, kRows, kTokenTiles>;
  // Of shared memory: a warp's ring, then its sums.
  static constexpr int kSumBytes = Epilogue::kWarpFloats * int(sizeof(float));
  static constexpr int kWarpBytes = Stream::kRingBytes > kSumBytes ? Stream::kRingBytes : kSumBytes;
};

// Grid: (thread blocks of a wave, waves). Lines come longest first, and odd waves go backwards: so the work of a
// multiprocessor, which takes one thread block of every wave, evens out.
template <class Config>
__global__ void __launch_bounds__(32 * Config::kMaxWarps, Config::kMinBlocks)
    block_task_decode(const __grid_constant__ BlockTaskDecodeParams params) {
  using Element = typename Config::Element;
  constexpr int kTokenTiles = Config::kTokenTiles;
  constexpr int kRowTiles = Config::kRows / 16;
  constexpr int kStages = Config::kStages;

  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  const int wave_begin = blockIdx.y * gridDim.x;
  const int place = blockIdx.x;
  const int in_wave = blockIdx.y % 2 == 0 ? place : min(int(gridDim.x), params.tiles - wave_begin) - 1 - place;
  const int tile = wave_begin + in_wave;
  if (in_wave < 0 || tile >= params.tiles) return;
  int line, piece;
  params.pieces(line, piece, tile);
  if (params.line_order != nullptr) line = __ldg(params.line_order + line);
  const int in_block = piece * Config::kRows;
  const int feature = line * params.pieces.divisor * Config::kRows + in_block;
  if (feature >= params.output.features) return;

  const DecodeLine blocks(params.index, params.steps, line);
  // Each warp's chunks lie side by side: its tokens then come from cache lines that it has read before.
  const int chunks = (blocks.octets + kChunkOctets - 1) / kChunkOctets;
  const int begin = params.warps.div(chunks * warp) * kChunkOctets;
  const int end = min(params.warps.div(chunks * (warp + 1)) * kChunkOctets, blocks.octets);
  const Element* values =
      static_cast<const Element*>(params.values) + in_block * (Config::kTransposed ? 1 : params.block_width);
  typename Config::Stream stream(values, params.block_bytes, params.block_width, params.index, params.steps,
                                 params.tokens, blocks, begin, end,
                                 reinterpret_cast<uint4*>(shared_bytes + warp * Config::kWarpBytes), lane);

  typename Config::Epilogue::Sums sums = {};
  int stage = 0;
  for (int octet = begin; octet < end; octet += kChunkOctets) {
    stream.wait();
    stream.load(stage == 0 ? kStages - 1 : stage - 1);
    uint32_t low[kRowTiles][4], high[kRowTiles][4];
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) stream.read_weights(stage, m, low[m], high[m]);
    CUTE_UNROLL
    for (int t = 0; t < kTokenTiles; ++t) {
      const uint4 tokens = stream.read_tokens(stage, t);
      CUTE_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        auto& sum = sums[m][t];
        Config::Math::Atom::fma(sum[0], sum[1], sum[2], sum[3], low[m][0], high[m][0], low[m][1], high[m][1], tokens.x,
                                tokens.y, sum[0], sum[1], sum[2], sum[3]);
        Config::Math::Atom::fma(sum[0], sum[1], sum[2], sum[3], low[m][2], high[m][2], low[m][3], high[m][3], tokens.z,
                                tokens.w, sum[0], sum[1], sum[2], sum[3]);
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  cute::cp_async_wait<0>();
  Config::Epilogue::run(params.output, sums, reinterpret_cast<float*>(shared_bytes), feature);
}

}  // namespace block_sparse
