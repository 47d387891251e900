// Launches block_task for one arithmetic; each .cu instantiates the arithmetics it names.
#pragma once

#include "cuda_launch.h"
#include "gemm/block_task.h"

namespace block_sparse {

// Tile shapes, chosen by measurement on the H200 in bfloat16. A warp computes 64 x 64 outputs where it can (the fewest
// bytes from shared memory). Lines of small blocks share a tile of tokens, and every warp has all lines, so that all
// skip the same absent blocks. Every tile fits the 99 KB of the smallest sm_8x GPUs once, and those of A100 and Hopper
// twice or three times.
template <class Math, int kUnit, bool kTransposed>
struct BlockTaskTile;
//                                                            tokens, lines, warps along N, bytes of a stage's row,
//                                                            stages
template <class Math, bool kTransposed>
struct BlockTaskTile<Math, 128, kTransposed> : BlockTaskConfig<Math, 128, kTransposed, 128, 1, 2, 128, 3> {};
template <class Math>
struct BlockTaskTile<Math, 64, false> : BlockTaskConfig<Math, 64, false, 256, 1, 1, 128, 2> {};
template <class Math>
struct BlockTaskTile<Math, 64, true> : BlockTaskConfig<Math, 64, true, 128, 1, 1, 128, 3> {};
template <class Math, bool kTransposed>
struct BlockTaskTile<Math, 32, kTransposed> : BlockTaskConfig<Math, 32, kTransposed, 256, 2, 1, 64, 4> {};
template <class Math, bool kTransposed>
struct BlockTaskTile<Math, 16, kTransposed> : BlockTaskConfig<Math, 16, kTransposed, 256, 4, 1, 128, 2> {};

template <class Config>
const char* launch_block_task_config(const DenseSparseProblem& problem, const int32_t* line_order,
                                     cudaStream_t stream) {
  using Element = typename Config::Element;
  const Geometry& geometry = problem.geometry;
  const bool transposed = Config::kTransposed;
  BlockTaskParams params{};
  params.index = transposed ? LineIndex{problem.index.ccol_indices, problem.index.row_indices, problem.index.col_slots}
                            : LineIndex{problem.index.crow_indices, problem.index.col_indices, problem.index.row_slots};
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

template <class Math, bool kTransposed>
const char* launch_block_task_direction(const DenseSparseProblem& problem, const int32_t* line_order,
                                        cudaStream_t stream) {
  switch (piece_side(problem.geometry)) {
    case 128:
      return launch_block_task_config<BlockTaskTile<Math, 128, kTransposed>>(problem, line_order, stream);
    case 64:
      return launch_block_task_config<BlockTaskTile<Math, 64, kTransposed>>(problem, line_order, stream);
    case 32:
      return launch_block_task_config<BlockTaskTile<Math, 32, kTransposed>>(problem, line_order, stream);
    default:
      return launch_block_task_config<BlockTaskTile<Math, 16, kTransposed>>(problem, line_order, stream);
  }
}

template <class Math>
const char* launch_block_task_math(const DenseSparseProblem& problem, const int32_t* line_order, cudaStream_t stream) {
  return problem.direction == Direction::kForward
             ? launch_block_task_direction<Math, false>(problem, line_order, stream)
             : launch_block_task_direction<Math, true>(problem, line_order, stream);
}

}  // namespace block_sparse
