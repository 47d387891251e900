// The multiplying warpgroups for pieces of 32 or 16: each owns one half of the group, 128 tokens x 128 features.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "gemm/sm90_narrow_epilogue.h"
#include "gemm/sm90_narrow_loader.h"
#include "gemm/sm90_narrow_mma.h"

namespace block_sparse::sm90 {

// Run by one warpgroup; `thread` of its 128.
// `bias(feature)`: float, called with features of the output only.
template <class Config, class Shared, class Bias>
CUTE_DEVICE void multiply_narrow_tiles(Shared& shared, const TileRaster& raster, const typename Config::Work& work,
                                       const CUtensorMap* output_map, int features, int half, int thread, Bias bias,
                                       EpilogueActivation activation) {
  using Work = typename Config::Work;
  using Mma = NarrowMma<typename Config::Element, Work::kSide, Config::kMajorB>;
  using Store = NarrowStore<Config>;
  constexpr int kLines = Work::kHalfLines;
  constexpr int kSteps = Work::kSide / 16;  // instructions along K of a piece
  constexpr int kTiles = Config::kTokens / 64;
  const int lane = thread % 32;

  const uint64_t pieces = piece_operand<Work::kSide>(cute::cast_smem_ptr_to_uint(shared.pieces[0][half]));
  constexpr uint64_t kPieceStep = Config::kPieceBytes >> 4;
  constexpr uint64_t kStageStep = sizeof(shared.pieces[0]) >> 4;
  // ldmatrix.x4: lane l addresses token l % 16 of the warp's 16, inner elements 0 .. 7 or 8 .. 15 of a step. Rows are
  // 128 bytes in the 128-byte swizzle.
  const int row = thread / 32 * 16 + lane % 16;
  const uint32_t input = cute::cast_smem_ptr_to_uint(shared.input[0]) + row * 128;
  const auto load_tokens = [&](uint32_t (&a)[4], int stage, int tile, int step) {
    const uint32_t address =
        input + stage * Config::kInputBytes + tile * 64 * 128 + (((2 * step + lane / 16) ^ (row % 8)) << 4);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
  };
  const auto uniform = [](uint32_t mask) { return __shfl_sync(~0u, mask, 0); };
  const auto release = [&](int stage) {
    if (lane == 0) shared.ring.release(stage);
  };

  Store store(output_map, shared.staging[half], thread, 1 + half);
  RingPosition at;
  while (true) {
    shared.ring.wait_full(at);
    int ends = load_shared(shared.control[at.stage].tile);
    if (ends == NarrowControl::kNoMoreTiles) break;
    float accumulator[kTiles][kLines][Work::kSide / 2];
    const auto for_each_sum = [&](auto visit) {
      CUTE_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        CUTE_UNROLL
        for (int line = 0; line < kLines; ++line) {
          CUTE_UNROLL
          for (int i = 0; i < Work::kSide / 2; ++i) visit(accumulator[tile][line][i]);
        }
      }
    };
    const auto fence = [&] { for_each_sum([](float& sum) { cute::warpgroup_fence_operand(sum); }); };
    for_each_sum([](float& sum) { sum = 0; });
    while (true) {
      const int stage = at.stage;
      const uint32_t mask = uniform(load_shared(shared.control[stage].mask[half]));
      if (mask) {
        uint32_t tokens[kTiles][kChunk / 16][4];  // operand A: (64 TOKENS, 16 of K) a tile and step
        const uint64_t stage_pieces = pieces + stage * kStageStep;
        fence();
        CUTE_UNROLL
        for (int part = 0; part < Work::kChunkParts; ++part) {
          if (!(mask >> (part * kLines) & ((1u << kLines) - 1))) continue;
          CUTE_UNROLL
          for (int tile = 0; tile < kTiles; ++tile) {
            CUTE_UNROLL
            for (int k = part * kSteps; k < (part + 1) * kSteps; ++k) load_tokens(tokens[tile][k], stage, tile, k);
          }
          cute::warpgroup_arrive();
          CUTE_UNROLL
          for (int line = 0; line < kLines; ++line) {
            const int bit = part * kLines + line;
            if (!(mask >> bit & 1)) continue;
            CUTE_UNROLL
            for (int tile = 0; tile < kTiles; ++tile) {
              CUTE_UNROLL
              for (int k = 0; k < kSteps; ++k) {
                Mma::add_product(tokens[tile][part * kSteps + k], stage_pieces + bit * kPieceStep + k * Mma::kStep,
                                 accumulator[tile][line]);
              }
            }
          }
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        fence();
      }
      release(stage);
      at.advance(Config::kStages);
      if (ends != NarrowControl::kGoesOn) break;
      shared.ring.wait_full(at);
      ends = load_shared(shared.control[at.stage].tile);
    }

    const auto place = raster(ends);
    const int32_t* first_features = work.groups[place.group].first_feature + half * kLines;
    store.run(accumulator, first_features, features, raster.first_token(place.token_tile), raster.tile_tokens, bias,
              activation);
  }
  store.finish();
}

}  // namespace block_sparse::sm90
