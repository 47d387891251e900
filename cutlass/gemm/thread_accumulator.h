// A warp's output tile in registers, and the matrix instructions that add to it.
#pragma once

#include "gemm/math_mode.h"
#include "gemm/shared_layout.h"

namespace block_sparse {

// One warp, kM x kN outputs. Operand tiles are in shared memory as (MN, K).
template <class Math, int kM, int kN, Major kMajorA, Major kMajorB>
struct ThreadAccumulator {
  using Operand = typename Math::Operand;
  static constexpr int kInstructionK = Math::kInstructionK;
  using Mma =
      cute::TiledMMA<cute::MMA_Atom<typename Math::Atom>, cute::Layout<cute::Shape<cute::_1, cute::_1, cute::_1>>,
                     cute::Tile<cute::_16, cute::_16, cute::Int<kInstructionK>>>;
  using Fragment = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::Int<kM>, cute::Int<kN>>{}));

  Fragment tCrC;  // (MMA, MMA_M, MMA_N) float
  // kTwoLevels: what tCrC held after each kRun stages, summed. Two chains of additions, each a fraction as long as one.
  cute::conditional_t<Math::kTwoLevels, Fragment, cute::tuple<>> tCrSum;

  CUTE_DEVICE ThreadAccumulator() {
    cute::clear(tCrC);
    if constexpr (Math::kTwoLevels) cute::clear(tCrSum);
  }

  // After stage number `stage`, counted from 0.
  CUTE_DEVICE void end_stage(int stage) {
    if constexpr (Math::kTwoLevels) {
      if (stage % kRun != kRun - 1) return;
      CUTE_UNROLL
      for (int i = 0; i < cute::size(tCrC); ++i) tCrSum(i) += tCrC(i);
      cute::clear(tCrC);
    }
  }

  // After the last stage: the whole sum is then in tCrC.
  CUTE_DEVICE void finish() {
    if constexpr (Math::kTwoLevels) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(tCrC); ++i) tCrC(i) += tCrSum(i);
    }
  }

  // Adds sA sBᵀ for one stage.
  template <class TensorA, class TensorB>
  CUTE_DEVICE void add_product(const TensorA& sA,  // (kM, K)
                               const TensorB& sB,  // (kN, K)
                               int lane) {
    add_product<kN, kInstructionK * Math::kSumSteps>(sA, sB, lane, [](int, int) { return true; });
  }

  // The same where blocks may be absent: `present(k, n)` says whether columns n .. n + kSkipN of this warp's tile take
  // part at inner indices k .. k + kSkipK. It must be uniform over the warp; k and n are constants after unrolling.
  template <int kSkipN, int kSkipK, class TensorA, class TensorB, class Present>
  CUTE_DEVICE void add_product(const TensorA& sA,  // (kM, K)
                               const TensorB& sB,  // (kN, K)
                               int lane, Present present) {
    using namespace cute;
    Mma mma;
    auto copy_a = make_tiled_copy_A(FragmentCopyAtom<Operand, kMajorA>{}, mma);
    auto copy_b = make_tiled_copy_B(FragmentCopyAtom<Operand, kMajorB>{}, mma);
    auto thread_copy_a = copy_a.get_slice(lane);
    auto thread_copy_b = copy_b.get_slice(lane);
    auto thread_mma = mma.get_slice(lane);
    auto tXsA = thread_copy_a.partition_S(sA);  // (CPY, CPY_M, CPY_K)
    auto tXsB = thread_copy_b.partition_S(sB);  // (CPY, CPY_N, CPY_K)
    constexpr int kSteps = size<2>(decltype(tXsA){}.shape());
    constexpr int kSkipSteps = kSkipK / kInstructionK;
    static_assert(kSkipSteps % Math::kSumSteps == 0 && kSteps % kSkipSteps == 0);
    // Columns whose B fragments are in registers together: few where every operand takes twice the registers.
    constexpr int kColumns = Math::kProducts == 1 ? kSkipN : kCopyN;

    CUTE_UNROLL
    for (int first_step = 0; first_step < kSteps; first_step += kSkipSteps) {
      auto tCrA =
          thread_mma.partition_fragment_A(local_tile(sA, Shape<Int<kM>, Int<kSkipK>>{}, make_coord(_0{}, _0{})));
      auto tXrA = thread_copy_a.retile_D(tCrA);
      CUTE_UNROLL
      for (int step = 0; step < kSkipSteps; ++step) copy(copy_a, tXsA(_, _, first_step + step), tXrA(_, _, step));
      auto a_low = split(tCrA);
      CUTE_UNROLL
      for (int column = 0; column < kN; column += kColumns) {
        if (!present(first_step * kInstructionK, column / kSkipN * kSkipN)) continue;
        auto tCrB = thread_mma.partition_fragment_B(
            local_tile(sB, Shape<Int<kColumns>, Int<kSkipK>>{}, make_coord(_0{}, _0{})));
        auto tXrB = thread_copy_b.retile_D(tCrB);
        CUTE_UNROLL
        for (int step = 0; step < kSkipSteps; ++step) {
          CUTE_UNROLL
          for (int i = 0; i < kColumns / kCopyN; ++i) {
            copy(copy_b, tXsB(_, column / kCopyN + i, first_step + step), tXrB(_, i, step));
          }
        }
        auto b_low = split(tCrB);
        CUTE_UNROLL
        for (int step = 0; step < kSkipSteps; step += Math::kSumSteps) {
          CUTE_UNROLL
          for (int n = 0; n < kColumns / 8; ++n) {
            auto target = tCrC(_, _, column / 8 + n);  // (MMA, MMA_M)
            if constexpr (Math::kProducts == 1) {
              CUTE_UNROLL
              for (int m = 0; m < kM / 16; ++m) gemm_atom(mma, tCrA(_, m, step), tCrB(_, n, step), target, m);
            } else {
              add_split_products(mma, tCrA, a_low, tCrB, b_low, step, n, target);
            }
          }
        }
      }
    }
  }

 private:
  static constexpr int kCopyN = 16;  // columns that one copy of B fragments covers
  static constexpr int kRun = 8;     // stages

  template <class A, class B, class C>
  static CUTE_DEVICE void gemm_atom(const Mma& mma, const A& a, const B& b, C& target, int m) {
    auto c = target(cute::_, m);
    cute::gemm(mma, a, b, c);
  }

  // The matrix unit cuts instead of rounding when it adds to its accumulator, which over a long sum would cost float32
  // its last bits: it sums the products of kSumSteps steps only, ordinary additions do the rest. Small products first.
  template <class A, class B, class C>
  static CUTE_DEVICE void add_split_products(const Mma& mma, const A& a, const A& a_low, const B& b, const B& b_low,
                                             int first_step, int n, C& target) {
    auto partial = cute::make_fragment_like(target);  // (MMA, MMA_M)
    cute::clear(partial);
    auto add = [&](const A& left, const B& right) {
      CUTE_UNROLL
      for (int step = first_step; step < first_step + Math::kSumSteps; ++step) {
        CUTE_UNROLL
        for (int m = 0; m < kM / 16; ++m) {
          gemm_atom(mma, left(cute::_, m, step), right(cute::_, n, step), partial, m);
        }
      }
    };
    add(a_low, b);
    add(a, b_low);
    add(a, b);
    CUTE_UNROLL
    for (int i = 0; i < cute::size(partial); ++i) target(i) += partial(i);
  }

  // Rounds a freshly read fragment to what the matrix unit takes; returns what rounding lost (used by 3xTF32 only).
  template <class Tensor>
  static CUTE_DEVICE auto split(Tensor& fragment) {
    auto low = cute::make_fragment_like(fragment);
    if constexpr (std::is_same_v<typename Math::Element, float>) {
      auto high_bits = cute::recast<float>(fragment);
      auto low_bits = cute::recast<float>(low);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(high_bits); ++i) {
        float value = high_bits(i);
        float high = round_to_tf32(value);
        high_bits(i) = high;
        if constexpr (Math::kProducts == 3) low_bits(i) = round_to_tf32(value - high);
      }
    }
    return low;
  }
};

}  // namespace block_sparse
