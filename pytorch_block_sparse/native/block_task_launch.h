// Launches block_task for one arithmetic; each .cu instantiates the arithmetics it names.
#pragma once

#include "cuda_launch.h"
#include "cuda_tiles.h"
#include "gemm/block_task.h"
#include "line_index.h"

namespace block_sparse {

template <class Math>
constexpr SumKind kSumKind = Math::kTwoLevels       ? SumKind::kTripleTwoLevels
                             : Math::kProducts == 3 ? SumKind::kTriple
                                                    : SumKind::kSingle;

template <class Math, int kUnit, bool kTransposed>
struct BlockTaskTile {
  static constexpr TileShape kShape = block_task_tile(kSumKind<Math>, kUnit, kTransposed);
  using Config = BlockTaskConfig<Math, kUnit, kTransposed, kShape.tokens, kShape.lines, kShape.warps_n,
                                 kShape.stage_bytes, kShape.stages>;
};

template <class Config>
const char* launch_block_task_config(const DenseSparseProblem& problem, const int32_t* line_order,
                                     cudaStream_t stream) {
  using Element = typename Config::Element;
  const Geometry& geometry = problem.geometry;
  const bool transposed = Config::kTransposed;
  BlockTaskParams params{};
  params.index = line_index(problem.index, transposed);
  params.line_order = line_order;
  params.lines = int(transposed ? geometry.grid_cols() : geometry.grid_rows());
  params.block_elements = geometry.block_height * geometry.block_width;
  params.block_width = int(geometry.block_width);
  int64_t block_n = transposed ? geometry.block_width : geometry.block_height;
  int64_t block_k = transposed ? geometry.block_height : geometry.block_width;
  params.pieces_n = int(block_n / Config::kUnit);
  params.block_k = int(block_k);
  params.chunks_per_block = int(block_k / Config::kChunk);
  params.tokens = problem.tokens;
  params.extent_n = int(transposed ? geometry.in_features : geometry.out_features);
  params.extent_k = int(transposed ? geometry.out_features : geometry.in_features);
  params.input = problem.input;
  params.input_stride = problem.input_stride;
  params.values = problem.values;
  params.bias = problem.bias;
  params.output = problem.output;
  params.activation = EpilogueActivation(int(problem.activation));
  params.input_aligned = rows_aligned(problem.input, problem.input_stride, sizeof(Element));
  params.values_aligned = is_aligned(problem.values);
  params.output_aligned = rows_aligned(problem.output, params.extent_n, sizeof(Element));

  int64_t token_tiles = (problem.tokens + Config::kTokens - 1) / Config::kTokens;
  int64_t line_groups = (int64_t(params.lines) * params.pieces_n + Config::kLines - 1) / Config::kLines;
  int64_t strip = StripRaster::kStripTokens / Config::kTokens;
  params.raster = {int(token_tiles), int(line_groups), int(token_tiles < strip ? token_tiles : strip)};
  if (params.raster.size() > INT32_MAX) return "block_sparse: the output has more than 2^31 tiles";
  return launch(block_task<Config>, dim3(unsigned(params.raster.size())), Config::kThreads,
                sizeof(typename Config::SharedStorage), stream, params);
}

template <class Math, int kUnit, bool kTransposed>
const char* launch_block_task_tile(const DenseSparseProblem& problem, const int32_t* line_order, cudaStream_t stream) {
  return launch_block_task_config<typename BlockTaskTile<Math, kUnit, kTransposed>::Config>(problem, line_order,
                                                                                            stream);
}

template <class Math, bool kTransposed>
const char* launch_block_task_direction(const DenseSparseProblem& problem, const int32_t* line_order,
                                        cudaStream_t stream) {
  switch (piece_side(problem.geometry)) {
    case 128:
      return launch_block_task_tile<Math, 128, kTransposed>(problem, line_order, stream);
    case 64:
      return launch_block_task_tile<Math, 64, kTransposed>(problem, line_order, stream);
    case 32:
      return launch_block_task_tile<Math, 32, kTransposed>(problem, line_order, stream);
    default:
      return launch_block_task_tile<Math, 16, kTransposed>(problem, line_order, stream);
  }
}

template <class Math>
const char* launch_block_task_math(const DenseSparseProblem& problem, const int32_t* line_order, cudaStream_t stream) {
  return problem.direction == Direction::kForward
             ? launch_block_task_direction<Math, false>(problem, line_order, stream)
             : launch_block_task_direction<Math, true>(problem, line_order, stream);
}

}  // namespace block_sparse
