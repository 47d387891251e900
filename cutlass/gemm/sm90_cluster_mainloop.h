// The multiplying warpgroups of the cluster kernel: each owns one half of the thread block's lines, 64 features x 256
// tokens.
#pragma once

#include "gemm/sm90_cluster_loader.h"
#include "gemm/sm90_epilogue.h"

namespace block_sparse::sm90 {

// visit(1), ..., visit(kMost), as compile-time constants.
template <int kMost, class Visit>
CUTE_DEVICE void for_each_count(Visit visit) {
  [&]<int... kCount>(std::integer_sequence<int, kCount...>) {
    (visit(std::integral_constant<int, kCount + 1>{}), ...);
  }(std::make_integer_sequence<int, kMost>{});
}

// Run by one warpgroup; `thread` of its 128. `bias(feature)`: float, called with features of the output only.
template <class Config, class Shared, class Bias>
CUTE_DEVICE void multiply_cluster_tiles(Shared& shared, const TileRaster& raster, const typename Config::Work& work,
                                        const CUtensorMap* output_map, int features, int quarter, int half, int thread,
                                        Bias bias, EpilogueActivation activation) {
  using Element = typename Config::Element;
  using Work = typename Config::Work;
  using Mma = Mma64x256<Element, Config::kMajorA>;
  constexpr int kSide = Work::kSide;
  constexpr int kSteps = kSide / 16;  // instructions along K of a part
  const int lane = thread % 32;
  // Descriptors of stage 0, and what the next stage and the next part of a chunk add.
  const uint64_t pieces = swizzled_operand<kSide>(cute::cast_smem_ptr_to_uint(shared.pieces[0][half]));
  const uint64_t input = swizzled_operand(cute::cast_smem_ptr_to_uint(shared.input[0]));
  constexpr uint64_t kPiecesStep = sizeof(shared.pieces[0]) >> 4;
  constexpr uint64_t kInputStep = sizeof(shared.input[0]) >> 4;
  constexpr uint64_t kPartPieces = Work::kQuarterLines * Config::kPieceBytes >> 4;
  constexpr uint64_t kPartInput = kSide * sizeof(Element) >> 4;

  // A warp lets go of a stage in every thread block of the cluster: its tokens may come from all of them.
  const auto release = [&](int stage) { shared.ring.empty[stage].arrive(lane, lane < Work::kRanks); };
  DeferredStore<Element, kSide> store(output_map, shared.staging[half], thread, 1 + half);
  RingPosition at;
  int ends;
  const auto wait_stage = [&] {
    shared.ring.wait_full(at);
    ends = load_shared(shared.control[at.stage].tile);
  };

  while (true) {
    wait_stage();
    if (ends == ClusterControl::kNoMoreTiles) break;  // here, where no matrix instruction is in flight
    float accumulator[128];
    CUTE_UNROLL
    for (float& sum : accumulator) sum = 0;
    int busy = -1;  // the stage that our last instructions may still read
    while (true) {
      const int stage = at.stage;
      uint32_t parts = __shfl_sync(~0u, load_shared(shared.control[stage].parts[half]), 0);
      if (parts) {
        const int present = __popc(parts);
        // One straight line of instructions for each number of parts: a branch among them would serialise them.
        for_each_count<Work::kParts>([&](auto count) {
          if (present != count) return;
          CUTE_UNROLL
          for (float& sum : accumulator) cute::warpgroup_fence_operand(sum);
          cute::warpgroup_arrive();
          CUTE_UNROLL
          for (int i = 0; i < count; ++i) {
            const int part = count == Work::kParts ? i : __ffs(parts) - 1;
            parts &= parts - 1;
            CUTE_UNROLL
            for (int k = 0; k < kSteps; ++k) {
              Mma::add_product(
                  pieces + stage * kPiecesStep + part * kPartPieces + k * kInstructionStep<Config::kMajorA, kSide>,
                  input + stage * kInputStep + part * kPartInput + k * kInstructionStep<MajorMode::K>, accumulator);
            }
          }
          cute::warpgroup_commit_batch();
          cute::warpgroup_wait<1>();
          CUTE_UNROLL
          for (float& sum : accumulator) cute::warpgroup_fence_operand(sum);
        });
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
      if (ends != ClusterControl::kGoesOn) break;
      wait_stage();
    }
    cute::warpgroup_wait<0>();
    CUTE_UNROLL
    for (float& sum : accumulator) cute::warpgroup_fence_operand(sum);
    if (busy >= 0) release(busy);

    while (store.pending()) store.store_next();  // what this tile's items left over
    const auto place = raster(ends);
    store.template begin<!Config::kTransposed>(accumulator,
                                               work.groups[place.group].first_feature + quarter * Work::kQuarterLines,
                                               features, place.token_tile * Config::kTokens, bias, activation);
  }
  store.finish();
}

}  // namespace block_sparse::sm90
