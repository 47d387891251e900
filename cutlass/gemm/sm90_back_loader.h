// The loading warps of the Hopper weight gradient: TMA copies of the strips of dy and x into the ring's stages.
//
// A stage is an array of strips, each [tokens of a stage, piece] elements in the swizzle that WGMMA reads as an
// MN-major operand. Four warps issue the copies, one strip a lane: one warp is too slow for that many small boxes.
#pragma once

#include <cuda.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/sm90_back_pace.h"
#include "gemm/sm90_back_schedule.h"
#include "gemm/sm90_ring.h"

namespace block_sparse {

template <class Config>
struct BackLoader {
  static constexpr int kLoadingWarps = 4;

  const CUtensorMap* input;            // x [T, I]
  const CUtensorMap* output_gradient;  // dy [T, O]
  const int32_t* work;

  struct Strip {
    const CUtensorMap* operand;
    int feature;  // -1: this lane has no strip in the tile
    int loaded;   // strips of the tile
  };

  CUTE_DEVICE Strip strip(int tile, int index) const {
    const int2 entry = __ldg(reinterpret_cast<const int2*>(work + kBackHeaderWords) + tile);
    BackTileShape shape = BackTileShape::decode(uint32_t(entry.y));
    if (index >= shape.loaded()) return {input, -1, shape.loaded()};
    int number = __ldg(reinterpret_cast<const uint16_t*>(work + entry.x) + index);
    bool from_input = (index < shape.lines) == shape.transposed;
    return {from_input ? input : output_gradient, number * Config::kPiece, shape.loaded()};
  }

  // `thread`: 0 .. 127 of the loading warpgroup. `pace`: BackPace, or nothing where thread blocks need not wait for
  // each other.
  template <class... Pace>
  CUTE_DEVICE void run(const BackSchedule& schedule, typename Config::Barriers& barriers, uint8_t* stages_base,
                       const BackStages& stages, int thread, Pace&... pace) const {
    const int lane = thread % 32, warp = thread / 32;
    const int index = lane * kLoadingWarps + warp;  // neighbouring strips go to different warps
    RingPosition at;
    BackItem item = schedule.item(blockIdx.x, 0);
    if (item.tile < 0) return;
    Strip current = strip(item.tile, index);
    for (int wave = 0; item.tile >= 0; ++wave) {
      BackItem next_item = schedule.item(blockIdx.x, wave + 1);
      Strip next = current;
      if (next_item.tile >= 0) next = strip(next_item.tile, index);
      // A warp without strips arrives as well: else it could fall a lap behind and wait for ever.
      const int warp_bytes = (current.loaded + kLoadingWarps - 1 - warp) / kLoadingWarps * stages.strip_bytes;
      for (int step = item.first_step; step < item.last_step; ++step, at.advance(stages.count)) {
        (pace.step(), ...);
        barriers.wait_empty(at);
        if (lane == 0) barriers.expect_bytes(at, warp_bytes);
        if (current.feature >= 0) {
          cute::SM90_TMA_LOAD_2D::copy(current.operand, barriers.full_address(at),
                                       uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                       stages_base + at.stage * stages.bytes + index * stages.strip_bytes,
                                       current.feature, step * stages.tokens);
        }
      }
      item = next_item;
      current = next;
    }
  }
};

}  // namespace block_sparse
