#include "decode_plan.h"

#include <algorithm>

namespace block_sparse {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

bool decode_serves(Direction direction, DType dtype, const Geometry& geometry, int64_t tokens) {
  const int64_t inner = direction == Direction::kForward ? geometry.in_features : geometry.out_features;
  constexpr int64_t kVector = 8;                   // elements of 16 bytes
  constexpr int64_t kMostBlockElements = 1 << 30;  // offsets within a block are 32-bit
  return (dtype == DType::kBFloat16 || dtype == DType::kFloat16) && tokens > 0 && tokens <= kMostDecodeTokens &&
         geometry.block_height % 16 == 0 && geometry.block_width % 16 == 0 && inner % kVector == 0 &&
         geometry.block_height * geometry.block_width < kMostBlockElements;
}

Kernel choose_kernel(Direction direction, const Geometry& geometry, int64_t tokens, bool decode, bool hopper) {
  constexpr int64_t kMostTokensOf16 = 48;
  const bool of_16 = direction == Direction::kForward && geometry.block_height % 32 != 0;
  if (decode && !(hopper && of_16 && tokens > kMostTokensOf16)) return Kernel::kDecode;
  return hopper ? Kernel::kHopper : Kernel::kPortable;
}

DecodePlan plan_decode(Direction direction, const Geometry& geometry, int64_t tokens, int multiprocessors) {
  const bool forward = direction == Direction::kForward;
  const int64_t side = forward ? geometry.block_height : geometry.block_width;
  const int64_t features = forward ? geometry.out_features : geometry.in_features;
  DecodePlan plan;
  plan.tile.token_tiles = tokens <= 8 ? 1 : tokens <= 16 ? 2 : tokens <= 32 ? 4 : 8;
  // More rows read the tokens less often, which is what many of them cost. But no multiprocessor may be left idle.
  plan.tile.rows = 16;
  for (int rows : {32, 64}) {
    const bool wanted = plan.tile.token_tiles * 16 >= rows;
    if (wanted && side % rows == 0 && divide_up(features, rows) >= multiprocessors) plan.tile.rows = rows;
  }
  // All thread blocks are resident together: their dependent loads (order, index, blocks) are waited for once.
  constexpr int kMostTogether = 8;
  constexpr int kSharedBytes = 96 << 10;  // that every GPU has for a thread block
  const int resident = decode_resident_warps(plan.tile);
  const int64_t together = divide_up(divide_up(features, plan.tile.rows), multiprocessors);
  plan.warps = int(resident / std::min<int64_t>(together, kMostTogether));
  plan.warps = std::min({plan.warps, resident % 16 == 0 ? 16 : 8, kSharedBytes / decode_warp_bytes(plan.tile)});
  return plan;
}

}  // namespace block_sparse
