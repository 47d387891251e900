// Stores a finished tile while the next one is multiplied.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "gemm/epilogue_function.h"
#include "gemm/sm90_mma.h"
#include "gemm/sm90_ring.h"

namespace block_sparse::sm90 {

// Two floats as one register of Element, the first in the low half.
template <class Element>
CUTE_DEVICE uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  } else {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
}

// One warpgroup's tile, 64 features (lines of kSide) x 256 tokens, kept as packed pairs of tokens. It leaves in passes,
// as many as it has tokens for: transposed through shared memory, then by the copy engine, which clips what lies past
// the output's edges.
template <class Element, int kSide, int kPassTokens_>
class DeferredStore {
 public:
  static constexpr int kPassTokens = kPassTokens_;  // 64 or 128
  static constexpr int kPasses = 256 / kPassTokens;
  static constexpr int kBuffers = 128 / kPassTokens;
  static constexpr int kLines = 64 / kSide;
  struct Staging {
    alignas(1024) Element tokens[kBuffers][kLines][kPassTokens * kSide];  // (TOKENS, FEATURES) a line
  };
  using Features = int[kLines];  // the first of each line, in shared memory

  // `tile_tokens`: of every tile; `thread`: of the warpgroup's 128; `barrier`: a named barrier of its own.
  CUTE_DEVICE DeferredStore(const CUtensorMap* output_map, Staging& staging, Features& features, int tile_tokens,
                            int thread, int barrier)
      : output_map_(output_map),
        staging_(staging),
        features_(features),
        passes_((tile_tokens + kPassTokens - 1) / kPassTokens),
        thread_(thread),
        barrier_(barrier),
        pass_(passes_) {}

  CUTE_DEVICE bool pending() const { return pass_ < passes_; }

  // Takes over an accumulator of m64n256: registers 4 j + {0, 1} hold feature lane / 4 and tokens 8 j + 2 (lane % 4),
  // + 1; registers 4 j + {2, 3} hold the feature 8 further on. `first_features`: of each line; `bias_values`: of the
  // tile's 64 features, or null. Both in shared memory.
  template <bool kForward>
  CUTE_DEVICE void begin(const float (&accumulator)[128], const int* first_features, const Element* bias_values,
                         int first_token, EpilogueActivation activation) {
    using enum EpilogueActivation;
    const auto plain = [&] { pack(accumulator, [](float sum, int) { return sum; }); };
    if constexpr (!kForward) {
      plain();
    } else {
      const int feature = thread_ / 32 * 16 + thread_ % 32 / 4;
      float bias[2] = {};
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (bias_values) bias[i] = float(bias_values[feature + 8 * i]);
      }
      // One unrolled loop for each function: the choice is made once a tile, not for every element.
      const auto activated = [&]<EpilogueActivation kActivation>() {
        pack(accumulator, [&](float sum, int i) { return activate(sum + bias[i], kActivation); });
      };
      switch (activation) {
        case kRelu:
          activated.template operator()<kRelu>();
          break;
        case kGelu:
          activated.template operator()<kGelu>();
          break;
        case kGeluTanh:
          activated.template operator()<kGeluTanh>();
          break;
        case kSilu:
          activated.template operator()<kSilu>();
          break;
        default:
          if (bias_values) {
            activated.template operator()<kNone>();
          } else {
            plain();
          }
      }
    }
    if (thread_ == 0) {  // which is the one that reads them, too
      CUTE_UNROLL
      for (int line = 0; line < kLines; ++line) features_[line] = first_features[line];
    }
    first_token_ = first_token;
    pass_ = 0;
  }

  CUTE_DEVICE void store_next() {
    switch (pass_++) {  // constant register numbers
      case 0:
        return store_pass<0>();
      case 1:
        return store_pass<1>();
      case 2:
        if constexpr (kPasses > 2) return store_pass<2>();
        break;
      case 3:
        if constexpr (kPasses > 3) return store_pass<3>();
    }
  }

  CUTE_DEVICE void finish() {
    while (pending()) store_next();
    if (thread_ == 0) cute::tma_store_wait<0>();
  }

 private:
  // finish(sum, whether it is of the second of the thread's features)
  template <class Finish>
  CUTE_DEVICE void pack(const float (&accumulator)[128], const Finish& finish) {
    CUTE_UNROLL
    for (int i = 0; i < 64; ++i) {
      packed_[i] = pack_pair<Element>(finish(accumulator[2 * i], i % 2), finish(accumulator[2 * i + 1], i % 2));
    }
  }

  template <int kPass>
  CUTE_DEVICE void store_pass() {
    // stmatrix.x4.trans: matrices (features, next 8 features) x (8 tokens, next 8 tokens); lane l addresses row l % 8
    // of matrix l / 8.
    const int lane = thread_ % 32;
    const int row = lane % 8 + lane / 16 * 8;
    const int feature = thread_ / 32 * 16 + lane / 8 % 2 * 8;
    auto& buffer = staging_.tokens[kPass % kBuffers];
    Element* line = buffer[feature / kSide];
    if (thread_ == 0) cute::tma_store_wait<kBuffers - 1>();  // the store that last read this buffer
    cutlass::arch::NamedBarrier::sync(128, barrier_);
    CUTE_UNROLL
    for (int step = 0; step < kPassTokens / 16; ++step) {
      const uint32_t* pairs = packed_ + (kPass * (kPassTokens / 16) + step) * 4;
      const int token = step * 16 + row;
      Element* target = line + token * kSide + (feature % kSide / 8 ^ row_swizzle<kSide>(token)) * 8;
      cute::SM90_U16x8_STSM_T::copy(pairs[0], pairs[1], pairs[2], pairs[3],
                                    *reinterpret_cast<cute::uint128_t*>(target));
    }
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(128, barrier_);
    if (thread_ == 0) {
      CUTE_UNROLL
      for (int i = 0; i < kLines; ++i) {
        cute::SM90_TMA_STORE_2D::copy(output_map_, buffer[i], features_[i], first_token_ + kPass * kPassTokens);
      }
      cute::tma_store_arrive();
    }
  }

  const CUtensorMap* output_map_;
  Staging& staging_;
  Features& features_;
  int passes_;
  int thread_;
  int barrier_;
  uint32_t packed_[64];
  int first_token_ = 0;
  int pass_;  // passes stored
};

}  // namespace block_sparse::sm90
