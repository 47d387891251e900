#include "block_lines.h"

namespace block_sparse::cpu {

BlockLines block_lines(const DenseSparseProblem& problem) {
  const Geometry& g = problem.geometry;
  const PatternIndex& index = problem.index;
  if (problem.direction == Direction::kForward) {
    return {g.grid_rows(),  index.crow_indices, index.col_indices, index.row_slots,
            g.block_height, g.block_width,      g.out_features,    g.in_features};
  }
  return {g.grid_cols(), index.ccol_indices, index.row_indices, index.col_slots,
          g.block_width, g.block_height,     g.in_features,     g.out_features};
}

Unit share_begin(const BlockLines& lines, int64_t panels, int64_t first, int64_t last, int64_t part, int64_t parts) {
  const auto cost_before = [&](int64_t line) {
    return panels * (lines.offsets[line] - lines.offsets[first] + line - first);
  };
  const int64_t target = cost_before(last) * part / parts;
  int64_t low = first, high = last;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (cost_before(middle) <= target) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (low == last) return {last, 0};
  return {low, (target - cost_before(low)) / (lines.offsets[low + 1] - lines.offsets[low] + 1)};
}

}  // namespace block_sparse::cpu
