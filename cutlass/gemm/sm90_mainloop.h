// The multiplying warpgroups: each owns one line of the group, 64 features x 256 tokens.
#pragma once

#include "gemm/sm90_epilogue.h"
#include "gemm/sm90_loader.h"
#include "gemm/sm90_mma.h"

namespace block_sparse::sm90 {

// Run by one warpgroup; `thread` of its 128. `bias(feature)`: float, called with features of the output only.
template <class Config, class Shared, class Bias>
CUTE_DEVICE void multiply_tiles(Shared& shared, const TileRaster& raster, const WideWork& work,
                                const CUtensorMap* output_map, int features, int line, int thread, Bias bias,
                                EpilogueActivation activation) {
  using Element = typename Config::Element;
  using Mma = Mma64x256<Element, Config::kMajorA>;
  const int lane = thread % 32;
  // Descriptors of stage 0, and what the next stage adds.
  const uint64_t pieces = swizzled_operand(cute::cast_smem_ptr_to_uint(shared.pieces[0][line]));
  const uint64_t input = swizzled_operand(cute::cast_smem_ptr_to_uint(shared.input[0]));
  constexpr uint64_t kPieceStep = sizeof(shared.pieces[0]) >> 4;
  constexpr uint64_t kInputStep = sizeof(shared.input[0]) >> 4;

  const auto release = [&](int stage) {
    if (lane == 0) shared.ring.release(stage);
  };
  DeferredStore<Element> store(output_map, shared.staging[line], raster.tile_tokens, thread, 1 + line);
  RingPosition at;
  int control;
  const auto wait_stage = [&] {
    shared.ring.wait_full(at);
    control = load_shared(shared.control[at.stage]);
  };

  while (true) {
    wait_stage();
    if (control == StageControl::kNoMoreTiles) break;  // here, where no matrix instruction is in flight
    float accumulator[128];
    CUTE_UNROLL
    for (float& sum : accumulator) sum = 0;
    int busy = -1;  // the stage that our last instructions may still read
    while (true) {
      const int stage = at.stage;
      if (control >> line & 1) {
        CUTE_UNROLL
        for (float& sum : accumulator) cute::warpgroup_fence_operand(sum);
        cute::warpgroup_arrive();
        CUTE_UNROLL
        for (int k = 0; k < kChunk / 16; ++k) {
          Mma::add_product(pieces + stage * kPieceStep + k * kInstructionStep<Config::kMajorA>,
                           input + stage * kInputStep + k * kInstructionStep<MajorMode::K>, accumulator);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();
        CUTE_UNROLL
        for (float& sum : accumulator) cute::warpgroup_fence_operand(sum);
        if (busy >= 0) release(busy);
        busy = stage;
        if (store.pending()) store.store_next();
      } else {
        if (busy >= 0) {
          cute::warpgroup_wait<0>();
          release(busy);
          busy = -1;
        }
        __syncwarp();
        release(stage);
      }
      at.advance(Config::kStages);
      if (control & StageControl::kLast) break;
      wait_stage();
    }
    cute::warpgroup_wait<0>();
    CUTE_UNROLL
    for (float& sum : accumulator) cute::warpgroup_fence_operand(sum);
    if (busy >= 0) release(busy);

    while (store.pending()) store.store_next();  // what this tile's items left over
    const auto place = raster(control >> StageControl::kTileShift);
    const int first_feature = work.groups[place.group].first_feature[line];
    float line_bias[2];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int feature = first_feature + thread / 32 * 16 + lane / 4 + 8 * i;
      line_bias[i] = feature < features ? bias(feature) : 0.0f;
    }
    store.template begin<!Config::kTransposed>(accumulator, line_bias, activation, first_feature,
                                               raster.first_token(place.token_tile));
  }
  store.finish();
}

}  // namespace block_sparse::sm90
