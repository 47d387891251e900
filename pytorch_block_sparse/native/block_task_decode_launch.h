// Launches block_task_decode for one arithmetic; each .cu instantiates the arithmetic it names.
#pragma once

#include <algorithm>

#include "cuda_launch.h"
#include "decode_plan.h"
#include "gemm/block_task_decode.h"
#include "line_index.h"

namespace block_sparse {

template <class Config>
const char* launch_decode_config(const DenseSparseProblem& problem, int warps, const int32_t* line_order,
                                 int multiprocessors, cudaStream_t stream) {
  using Element = typename Config::Element;
  const Geometry& geometry = problem.geometry;
  constexpr bool kTransposed = Config::kTransposed;
  const int lines = int(kTransposed ? geometry.grid_cols() : geometry.grid_rows());
  const int positions = int(kTransposed ? geometry.grid_rows() : geometry.grid_cols());
  const int extent_k = int(kTransposed ? geometry.out_features : geometry.in_features);
  const int block_k = int(kTransposed ? geometry.block_height : geometry.block_width);

  BlockTaskDecodeParams params{};
  params.index = line_index(problem.index, kTransposed);
  params.line_order = line_order;
  params.warps = cutlass::FastDivmod(warps);
  params.pieces =
      cutlass::FastDivmod(int((kTransposed ? geometry.block_width : geometry.block_height) / Config::kRows));
  params.tiles = lines * params.pieces.divisor;
  params.steps = {block_k,       cutlass::FastDivmod(block_k / kOctet),    kChunk / block_k, kChunk % block_k,
                  positions - 1, (positions * block_k - extent_k) / kOctet};
  params.values = problem.values;
  params.block_bytes = uint32_t(geometry.block_height * geometry.block_width * sizeof(Element));
  params.block_width = int(geometry.block_width);
  const int64_t token_bytes = problem.input_stride * int64_t(sizeof(Element));
  params.tokens = {problem.input, 8 * token_bytes, token_bytes, int(problem.tokens)};
  const int features = int(kTransposed ? geometry.in_features : geometry.out_features);
  const bool paired = features % 2 == 0 && reinterpret_cast<uintptr_t>(problem.output) % 4 == 0;
  params.output = {
      problem.bias, problem.output, features, int(problem.tokens), EpilogueActivation(int(problem.activation)), paired};

  const int wave = std::min(params.tiles, multiprocessors);
  const dim3 grid(unsigned(wave), unsigned((params.tiles + wave - 1) / wave));
  return launch(block_task_decode<Config>, grid, 32 * warps, size_t(warps) * Config::kWarpBytes, stream, params);
}

template <class Math, bool kTransposed, int kRows, int kTokenTiles>
const char* launch_decode_tile(const DenseSparseProblem& problem, int warps, const int32_t* line_order,
                               int multiprocessors, cudaStream_t stream) {
  constexpr DecodeTile kTile{kRows, kTokenTiles};
  using Config = BlockTaskDecodeConfig<Math, kTransposed, kRows, kTokenTiles, decode_stages(kTile),
                                       decode_caches_tokens(kTile), decode_resident_warps(kTile)>;
  static_assert(Config::kWarpBytes == decode_warp_bytes(kTile));
  return launch_decode_config<Config>(problem, warps, line_order, multiprocessors, stream);
}

using DecodeLauncher = const char*(const DenseSparseProblem&, int warps, const int32_t* line_order, int multiprocessors,
                                   cudaStream_t);

// Those that plan_decode chooses.
template <class Math, bool kTransposed>
DecodeLauncher* decode_launcher(DecodeTile tile) {
  switch (100 * tile.rows + tile.token_tiles) {
    case 1601:
      return launch_decode_tile<Math, kTransposed, 16, 1>;
    case 1602:
      return launch_decode_tile<Math, kTransposed, 16, 2>;
    case 1604:
      return launch_decode_tile<Math, kTransposed, 16, 4>;
    case 1608:
      return launch_decode_tile<Math, kTransposed, 16, 8>;
    case 3202:
      return launch_decode_tile<Math, kTransposed, 32, 2>;
    case 3204:
      return launch_decode_tile<Math, kTransposed, 32, 4>;
    case 3208:
      return launch_decode_tile<Math, kTransposed, 32, 8>;
    case 6404:
      return launch_decode_tile<Math, kTransposed, 64, 4>;
    case 6408:
      return launch_decode_tile<Math, kTransposed, 64, 8>;
    default:
      return nullptr;
  }
}

template <class Math>
const char* launch_decode(const DenseSparseProblem& problem, const DecodePlan& plan, const int32_t* line_order,
                          int multiprocessors, cudaStream_t stream) {
  DecodeLauncher* launcher = problem.direction == Direction::kForward ? decode_launcher<Math, false>(plan.tile)
                                                                      : decode_launcher<Math, true>(plan.tile);
  if (launcher == nullptr) return "block_sparse: no decode kernel of this tile";
  return launcher(problem, plan.warps, line_order, multiprocessors, stream);
}

}  // namespace block_sparse
