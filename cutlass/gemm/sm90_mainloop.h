// The multiplying warpgroups: each owns one half of the group, 64 features x 256 tokens.
#pragma once

#include "gemm/sm90_epilogue.h"
#include "gemm/sm90_loader.h"
#include "gemm/sm90_mma.h"

namespace block_sparse::sm90 {

// visit(1), ..., visit(kMost), as compile-time constants.
template <int kMost, class Visit>
CUTE_DEVICE void for_each_count(Visit visit) {
  [&]<int... kCount>(std::integer_sequence<int, kCount...>) {
    (visit(std::integral_constant<int, kCount + 1>{}), ...);
  }(std::make_integer_sequence<int, kMost>{});
}

// Run by one warpgroup; `thread` of its 128.
template <class Config, class Shared>
CUTE_DEVICE void multiply_tiles(Shared& shared, const TaskParams<typename Config::Work>& params,
                                const CUtensorMap* output_map, int half, int thread) {
  using Element = typename Config::Element;
  using Work = typename Config::Work;
  using Mma = Mma64x256<Element, Config::kMajorA>;
  constexpr int kSide = Work::kSide;
  const int lane = thread % 32;
  // In a cluster an address' upper bits say whose shared memory it is: an operand's place is within our own.
  constexpr uint32_t kOwnBits = Config::kCluster == 1 ? ~0u : 0x3ffff;
  // Where the operands of stage 0 are, and how much further on those of the next stage and the next part.
  const uint32_t pieces =
      operand_place<Config::kMajorA, kSide>(cute::cast_smem_ptr_to_uint(shared.pieces[0][half]) & kOwnBits);
  const uint32_t input = operand_place<MajorMode::K, kSide>(cute::cast_smem_ptr_to_uint(shared.input[0]) & kOwnBits);
  constexpr uint32_t kPieceStep = sizeof(shared.pieces[0]) / 16;
  constexpr uint32_t kInputStep = sizeof(shared.input[0]) / 16;
  constexpr uint32_t kPartPieces = Work::kHalfLines * Config::kPieceBytes / 16;
  constexpr uint32_t kPartInput = kSide * sizeof(Element) / 16;  // within a chunk, or a pair of them
  constexpr uint32_t kChunkInput = Config::kTokens * Work::kChunkInputs * sizeof(Element) / 16;

  const auto release = [&](int stage) {
    if constexpr (Config::kCluster == 1) {
      if (lane == 0) shared.ring.release(stage);
    } else {  // all who load into our stage
      if (lane < Config::kCluster) shared.ring.release(stage, lane);
    }
  };
  typename Config::Store store(output_map, shared.staging[half], shared.store_features[half], params.raster.tile_tokens,
                               thread, 1 + half);
  RingPosition at;
  uint64_t control;
  const auto wait_stage = [&] {
    shared.ring.wait_full(at);
    control = load_shared(shared.control[at.stage].word);
  };

  while (true) {
    wait_stage();
    if (StageControl::output(control) == StageControl::kNoMoreTiles) break;  // no matrix instruction is in flight here
    float accumulator[128];  // the first instruction does not read it, so it needs no zeros
    constexpr int kNone = -1, kNothingYet = -2;
    int busy = kNothingYet;  // the stage that our last instructions may still read
    while (true) {
      const int stage = at.stage;
      const uint32_t parts = StageControl::half_parts(control, half);
      if (part_count(parts)) {
        const bool pair = Work::kChunks == 2 && uint32_t(control) & kPartsAdjacent;
        const uint32_t stage_pieces = pieces + stage * kPieceStep;
        const uint32_t stage_input = input + stage * kInputStep;
        const uint32_t input_layout = pair ? operand_layout<kItemInputs>() : operand_layout<Work::kChunkInputs>();
        const uint32_t part_input = Work::kChunks == 1 || pair ? kPartInput : kChunkInput;
        // One straight line of instructions for each number of parts: a branch among them would serialise them.
        for_each_count<Work::kParts>([&](auto count) {
          if (part_count(parts) != count) return;
          if constexpr (Config::kCopiesPieces) cutlass::arch::fence_view_async_shared();  // what cp.async has written
          CUTE_UNROLL
          for (float& sum : accumulator) cute::warpgroup_fence_operand(sum);
          cute::warpgroup_arrive();
          CUTE_UNROLL
          for (int i = 0; i < count; ++i) {
            const int part = count == Work::kParts ? i : part_at(parts, i);
            CUTE_UNROLL
            for (int k = 0; k < kSide / 16; ++k) {
              constexpr uint32_t kPieceInstruction = kInstructionStep<Config::kMajorA, kSide>;
              constexpr uint32_t kInputInstruction = kInstructionStep<MajorMode::K, kSide>;
              Mma::add_product(
                  operand(operand_layout<kSide>(), stage_pieces + part * kPartPieces + k * kPieceInstruction),
                  operand(input_layout, stage_input + part * part_input + k * kInputInstruction), accumulator,
                  i == 0 && k == 0 && busy == kNothingYet);
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
          busy = kNone;
        }
        __syncwarp();
        release(stage);
      }
      at.advance(Config::kStages);
      if (StageControl::output(control) != StageControl::kGoesOn) break;
      wait_stage();
    }
    cute::warpgroup_wait<0>();
    CUTE_UNROLL
    for (float& sum : accumulator) cute::warpgroup_fence_operand(sum);
    if (busy >= 0) release(busy);
    if (busy == kNothingYet) {
      CUTE_UNROLL
      for (float& sum : accumulator) sum = 0;
    }

    while (store.pending()) store.store_next();  // what this tile's items left over
    const auto& output = shared.outputs[StageControl::output(control)];
    store.template begin<!Config::kTransposed>(accumulator, output.first_feature + half * Work::kHalfLines,
                                               params.bias ? output.bias + half * kHalfOutputs : nullptr,
                                               load_shared(output.first_token), params.activation);
  }
  store.finish();
}

}  // namespace block_sparse::sm90
