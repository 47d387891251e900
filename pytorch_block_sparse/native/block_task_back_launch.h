// Launches block_task_back for one arithmetic; each .cu instantiates the arithmetics it names.
#pragma once

#include "cuda_families.h"
#include "cuda_launch.h"
#include "cuda_tiles.h"
#include "gemm/block_task_back.h"

namespace block_sparse {

// Tile shapes, chosen by measurement on the H200 in bfloat16: 4 warps of 64 x 64 outputs, or of one row of pieces x 64.
// In 3xTF32 the stages of b = 128 are half as long, for the registers.
template <class Math, int kUnit>
struct BlockTaskBackTile;
//                                                     group, warps along M, tokens of a stage, stages, thread blocks
template <class Math>
struct BlockTaskBackTile<Math, 128>
    : BlockTaskBackConfig<Math, 128, piece_group(128), 2,
                          (Math::kProducts == 1 ? 128 : 64) / int(sizeof(typename Math::Element)),
                          Math::kProducts == 1 ? 3 : 5, resident_blocks(128)> {};
template <class Math>
struct BlockTaskBackTile<Math, 64>
    : BlockTaskBackConfig<Math, 64, piece_group(64), 1, 64 / int(sizeof(typename Math::Element)), 4,
                          resident_blocks(64)> {};
template <class Math>
struct BlockTaskBackTile<Math, 32>
    : BlockTaskBackConfig<Math, 32, piece_group(32), 1, 64 / int(sizeof(typename Math::Element)), 3,
                          resident_blocks(32)> {};
template <class Math>
struct BlockTaskBackTile<Math, 16>
    : BlockTaskBackConfig<Math, 16, piece_group(16), 1, 64 / int(sizeof(typename Math::Element)), 3,
                          resident_blocks(16)> {};

template <class Config>
const char* launch_block_task_back_config(const SparseSupportProblem& problem, const SplitPlan& plan,
                                          const BackTarget& target, cudaStream_t stream) {
  using Element = typename Config::Element;
  const Geometry& geometry = problem.geometry;
  BlockTaskBackParams params{};
  params.crow_indices = problem.index.crow_indices;
  params.col_indices = problem.index.col_indices;
  params.row_slots = problem.index.row_slots;
  params.rows = geometry.grid_rows();
  params.nnz = geometry.nnz;
  params.block_height = int(geometry.block_height);
  params.block_width = int(geometry.block_width);
  params.tokens = problem.tokens;
  params.split_tokens = plan.split_tokens;
  params.out_features = int(geometry.out_features);
  params.in_features = int(geometry.in_features);
  params.output_gradient = problem.output_gradient;
  params.output_gradient_stride = problem.output_gradient_stride;
  params.input = problem.input;
  params.input_stride = problem.input_stride;
  params.result = target.result;
  params.result_float32 = target.float32;
  params.accumulate = target.accumulate;
  params.output_gradient_aligned =
      rows_aligned(problem.output_gradient, problem.output_gradient_stride, sizeof(Element));
  params.input_aligned = rows_aligned(problem.input, problem.input_stride, sizeof(Element));
  params.result_aligned = is_aligned(target.result);

  int64_t piece_rows = geometry.block_height / Config::kUnit;
  int64_t piece_columns = geometry.block_width / Config::kUnit;
  typename Config::Raster raster{params.rows * piece_rows, geometry.nnz * piece_rows * piece_columns};
  if (raster.size() > INT32_MAX) return "block_sparse: the weight gradient has more than 2^31 tiles";
  return launch(block_task_back<Config>, dim3(unsigned(raster.size()), unsigned(plan.splits)), Config::kThreads,
                sizeof(typename Config::SharedStorage), stream, params);
}

template <class Math>
const char* launch_block_task_back_math(const SparseSupportProblem& problem, const SplitPlan& plan,
                                        const BackTarget& target, cudaStream_t stream) {
  switch (piece_side(problem.geometry)) {
    case 128:
      return launch_block_task_back_config<BlockTaskBackTile<Math, 128>>(problem, plan, target, stream);
    case 64:
      return launch_block_task_back_config<BlockTaskBackTile<Math, 64>>(problem, plan, target, stream);
    case 32:
      return launch_block_task_back_config<BlockTaskBackTile<Math, 32>>(problem, plan, target, stream);
    default:
      return launch_block_task_back_config<BlockTaskBackTile<Math, 16>>(problem, plan, target, stream);
  }
}

}  // namespace block_sparse
