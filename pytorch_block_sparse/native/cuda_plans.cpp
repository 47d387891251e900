#include "cuda_plans.h"

#include "cuda_kernels.h"
#include "cuda_tiles.h"
#include "decode_plan.h"

namespace block_sparse {
namespace {

std::string tile_text(SumKind sum, int side, bool transposed) {
  const TileShape tile = block_task_tile(sum, side, transposed);
  return std::to_string(tile.tokens) + " x " + std::to_string(tile.lines * side);
}

// The choice that the dispatch makes for an aligned problem of square blocks.
bool hopper_serves(DType dtype, Direction direction, int side) {
  static constexpr int32_t work_lists = 0;
  DenseSparseProblem problem{};
  problem.direction = direction;
  problem.dtype = dtype;
  problem.geometry = {side, side, side, side, 1};
  problem.index.work_lists = &work_lists;
  problem.tokens = 1;
  problem.input_stride = side;
  return block_task_sm90_serves(problem);
}

std::string dense_sparse_text(bool hopper, DType dtype, SumKind sum, Direction direction, int side) {
  if (hopper && hopper_serves(dtype, direction, side)) return "Hopper's";
  std::string text = tile_text(sum, side, direction == Direction::kInputGradient);
  if (sum == SumKind::kTriple) {
    text += " (" + tile_text(SumKind::kTripleTwoLevels, side, direction == Direction::kInputGradient) +
            " where outputs are few)";
  }
  return text;
}

std::string back_text(bool hopper, DType dtype, int side) {
  static constexpr int32_t work_lists = 0;
  SparseSupportProblem problem{};
  problem.dtype = dtype;
  problem.geometry = {side, side, side, side, 1};
  problem.index.work_lists = &work_lists;
  problem.tokens = 1;
  problem.input_stride = problem.output_gradient_stride = side;
  if (hopper && block_task_back_sm90_serves(problem)) return "Hopper's";
  return std::to_string(side) + " x " + std::to_string(side * piece_group(side));
}

}  // namespace

std::vector<CudaPlan> cuda_plans(bool hopper) {
  struct Row {
    const char* name;
    DType dtype;
    SumKind sum;
  };
  constexpr Row rows[] = {{"bfloat16", DType::kBFloat16, SumKind::kSingle},
                          {"float16", DType::kFloat16, SumKind::kSingle},
                          {"tf32", DType::kFloat32, SumKind::kSingle},
                          {"float32", DType::kFloat32, SumKind::kTriple}};
  std::vector<CudaPlan> plans;
  for (const Row& row : rows) {
    for (int side : {16, 32, 64, 128}) {
      plans.push_back({row.name, std::to_string(side),
                       "forward " + dense_sparse_text(hopper, row.dtype, row.sum, Direction::kForward, side) +
                           ", input gradient " +
                           dense_sparse_text(hopper, row.dtype, row.sum, Direction::kInputGradient, side) +
                           ", weight gradient " + back_text(hopper, row.dtype, side)});
    }
  }
  plans.push_back({"bfloat16, float16", "any of these",
                   "forward and input gradient of up to " + std::to_string(kMostDecodeTokens) + " tokens: decode"});
  plans.push_back({"float64", "any", "one thread an output"});
  plans.push_back({"any", "any other", "one thread an output, unless 16 divides both sides"});
  return plans;
}

}  // namespace block_sparse
