// Stores a finished tile of narrow lines: 128 tokens x 128 features of one warpgroup, in passes of 64 tokens, as many
// as it has tokens for.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/sm90_epilogue.h"

namespace block_sparse::sm90 {

template <class Config>
class NarrowStore {
 public:
  using Element = typename Config::Element;
  static constexpr int kSide = Config::Work::kSide;
  static constexpr int kLines = Config::Work::kHalfLines;
  static constexpr int kPassTokens = Config::kStoreTokens;
  static constexpr int kTiles = Config::kTokens / kPassTokens;
  struct Staging {
    alignas(1024) Element tokens[kLines][kPassTokens * kSide];  // (TOKENS, FEATURES) a line, swizzled over its row
  };

  // `thread`: of the warpgroup's 128; `barrier`: a named barrier of its own.
  CUTE_DEVICE NarrowStore(const CUtensorMap* output_map, Staging& staging, int thread, int barrier)
      : output_map_(output_map), staging_(staging), thread_(thread), barrier_(barrier) {}

  // `accumulator`: m64 n(kSide) of each 64 tokens and line: registers 4 j + {0, 1} hold token lane / 4 of the warp's 16
  // and features 8 j + 2 (lane % 4), + 1; registers 4 j + {2, 3} hold the token 8 further on.
  template <class Bias>
  CUTE_DEVICE void run(const float (&accumulator)[kTiles][kLines][kSide / 2], const int32_t* first_features,
                       int features, int first_token, int tokens, Bias bias, EpilogueActivation activation) {
    using enum EpilogueActivation;
    CUTE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile * kPassTokens >= tokens) break;
      if (thread_ == 0) cute::tma_store_wait<0>();  // the stores that last read the staging
      cutlass::arch::NamedBarrier::sync(128, barrier_);
      switch (Config::kTransposed ? kNone : activation) {
        case kRelu:
          stage<kRelu>(accumulator[tile], first_features, features, bias);
          break;
        case kGelu:
          stage<kGelu>(accumulator[tile], first_features, features, bias);
          break;
        case kGeluTanh:
          stage<kGeluTanh>(accumulator[tile], first_features, features, bias);
          break;
        case kSilu:
          stage<kSilu>(accumulator[tile], first_features, features, bias);
          break;
        default:
          stage<kNone>(accumulator[tile], first_features, features, bias);
      }
      cute::tma_store_fence();
      cutlass::arch::NamedBarrier::sync(128, barrier_);
      if (thread_ == 0) {
        for (int line = 0; line < kLines; ++line) {
          cute::SM90_TMA_STORE_2D::copy(output_map_, staging_.tokens[line], first_features[line],
                                        first_token + tile * kPassTokens);
        }
        cute::tma_store_arrive();
      }
    }
  }

  CUTE_DEVICE void finish() {
    if (thread_ == 0) cute::tma_store_wait<0>();
  }

 private:
  template <EpilogueActivation kActivation, class Bias>
  CUTE_DEVICE void stage(const float (&accumulator)[kLines][kSide / 2], const int32_t* first_features, int features,
                         Bias bias) {
    // stmatrix.x4: matrices (8 tokens, next 8) x (8 features, next 8); lane l addresses row l % 8 of matrix l / 8.
    const int lane = thread_ % 32;
    const int row = thread_ / 32 * 16 + lane % 16;
    const int row_swizzle = kSide == 32 ? row / 2 % 4 : row / 4 % 2;
    CUTE_UNROLL
    for (int line = 0; line < kLines; ++line) {
      CUTE_UNROLL
      for (int pair = 0; pair < kSide / 16; ++pair) {
        uint32_t packed[4];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int feature = first_features[line] + pair * 16 + j * 8 + lane % 4 * 2;
          const float2 shift = feature < features ? bias(feature) : float2{0, 0};
          const float* sums = accumulator[line] + (pair * 2 + j) * 4;
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            packed[j * 2 + i] = pack_pair<Element>(activate(sums[2 * i] + shift.x, kActivation),
                                                   activate(sums[2 * i + 1] + shift.y, kActivation));
          }
        }
        const int chunk = pair * 2 + lane / 16;
        Element* target = staging_.tokens[line] + row * kSide + (chunk ^ row_swizzle) * 8;
        cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3],
                                      *reinterpret_cast<cute::uint128_t*>(target));
      }
    }
  }

  const CUtensorMap* output_map_;
  Staging& staging_;
  int thread_;
  int barrier_;
};

}  // namespace block_sparse::sm90
