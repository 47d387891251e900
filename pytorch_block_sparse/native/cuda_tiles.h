// Tile shapes of the portable kernels: one table, for the kernels and for what `info` shows. Host types only.
#pragma once

namespace block_sparse {

// How products are summed (gemm/math_mode.h): one matrix instruction each, or three, in one chain or two levels.
enum class SumKind { kSingle, kTriple, kTripleTwoLevels };

struct TileShape {
  int tokens;
  int lines;        // block rows (forward) or block columns of one tile
  int warps_n;      // warps along the lines' outputs
  int stage_bytes;  // of a row of a stage
  int stages;
};

// Chosen by measurement on the H200 in bfloat16 and float32. A warp computes 64 x 64 outputs where it can (the fewest
// bytes from shared memory). Lines of small blocks share a tile of tokens, and every warp has all lines, so that all
// skip the same absent blocks. Every tile fits the 99 KB of the smallest sm_8x GPUs once, and those of A100 and Hopper
// twice or three times.
constexpr TileShape block_task_tile(SumKind sum, int unit, bool transposed) {
  if (sum == SumKind::kSingle) {
    switch (unit) {
      case 128:
        return {128, 1, 2, 128, 3};
      case 64:
        return transposed ? TileShape{128, 1, 1, 128, 3} : TileShape{256, 1, 1, 128, 2};
      case 32:
        return {256, 2, 1, 128, 2};
      default:
        return {256, 4, 1, 128, 2};
    }
  }
  // Split operands take twice the registers: the reads of a long stage, which the compiler hoists, would spill.
  if (sum == SumKind::kTriple) {
    switch (unit) {
      case 128:
        return {128, 1, 2, 64, 5};
      case 64:
        return transposed ? TileShape{128, 1, 1, 64, 5} : TileShape{256, 1, 1, 64, 4};
      case 32:
        return {256, 2, 1, 64, 4};
      default:
        return {256, 4, 1, 128, 2};
    }
  }
  // Two accumulators: half the outputs.
  switch (unit) {
    case 128:
      return {64, 1, 2, 64, 5};
    case 64:
      return {128, 1, 1, 64, 5};
    case 32:
      return {128, 2, 1, 64, 4};
    default:
      return {128, 4, 1, 128, 3};
  }
}

// Weight gradient: pieces of one block row that a thread block computes together, 256 features of x where it can.
constexpr int piece_group(int side) { return side == 128 ? 1 : 256 / side; }

// Weight gradient: thread blocks that one multiprocessor of the H200 runs together.
constexpr int resident_blocks(int side) { return side == 16 ? 4 : side == 32 ? 3 : 2; }

}  // namespace block_sparse
