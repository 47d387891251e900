// From the accumulators of the Hopper weight gradient to the blocks of dW.
//
// A warpgroup's 64 x N results are cut into fragments of 16 features of M by 32 of N (16 where blocks may be that
// narrow), one a warp at a time. A fragment lies in one stored block or in none, and is written by 16-byte stores: rows
// of 64 bytes, or 32.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/arch/util.hpp>

#include "gemm/sm90_back_work.h"

namespace block_sparse {

// 8 x 8 16-bit elements, transposed across the warp.
CUTE_DEVICE uint32_t transpose_8x8(uint32_t word) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

// 4 x 4 words, transposed among the four lanes of a quad: lane q ends with word q of every lane. Its own inverse.
CUTE_DEVICE void transpose_quad(uint32_t (&words)[4], int lane) {
  CUTE_UNROLL
  for (int bit = 1; bit <= 2; bit <<= 1) {
    const bool high = lane & bit;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t received = __shfl_xor_sync(~0u, high ? words[i] : words[i | bit], bit);
      if (high) {
        words[i] = received;
      } else {
        words[i | bit] = received;
      }
    }
  }
}

struct BackEpilogueParams {
  void* result;      // dW [nnz, bh, bw]
  int block_height;  // bh
  int block_width;   // bw
  int cell;          // side of the squares that have a slot: 64, 32 or 16
  bool accumulate;   // beta = 1
};

// Where the fragments of one warp go, spread over its lanes: lane n knows where fragment n of N goes.
template <class Config>
struct BackDestination {
  int32_t slot = -1;       // -1: not stored
  uint32_t n_feature = 0;  // first of the fragment's features of N
  uint32_t m_feature;      // first of the warp's 16 features of M

  // Loads only: the arithmetic waits for the epilogue, when the data has long arrived.
  CUTE_DEVICE BackDestination(const int32_t* record, const BackTileShape& shape, int warpgroup, int cell) {
    constexpr int kPiece = Config::kPiece;
    const int column = threadIdx.x % 32 * Config::kFragmentColumns, warp = threadIdx.x / 32 % 4;
    const auto* strips = reinterpret_cast<const uint16_t*>(record);
    const int line = shape.first_line(warpgroup, kPiece) + warp * 16 / kPiece;
    m_feature = __ldg(strips + line) * kPiece + warp * 16 % kPiece;
    const int columns = shape.taken(warpgroup) * kPiece;
    if (column < columns) {
      slot = __ldg(record + back_slots_offset(shape, warpgroup, kPiece, cell) + warp * 16 / cell * (columns / cell) +
                   column / cell);
      n_feature = __ldg(strips + shape.first_strip(warpgroup) + column / kPiece) * kPiece + column % kPiece;
    }
  }
};

// The epilogue's code runs once a tile and is fetched from L2 each time, so it is kept short: whatever depends on the
// fragment alone is computed once, by the fragment's lane, and rare cases have code of their own.
template <class Config>
class BackEpilogue {
  using Result = typename Config::Result;
  static constexpr int kSums = Config::kFragmentColumns / 2;  // of a fragment, a lane

  Result* result_;
  int64_t offset_;  // of the fragment with this lane's number, -1: not stored
  int block_width_;
  bool transposed_;
  bool accumulate_;

 public:
  CUTE_DEVICE BackEpilogue(const BackEpilogueParams& params, const BackDestination<Config>& to, bool transposed)
      : result_(static_cast<Result*>(params.result)),
        block_width_(params.block_width),
        transposed_(transposed),
        accumulate_(params.accumulate) {
    const uint32_t height = params.block_height, width = params.block_width;
    const uint32_t row = (transposed ? to.n_feature : to.m_feature) % height;
    const uint32_t column = (transposed ? to.m_feature : to.n_feature) % width;
    offset_ = to.slot < 0 ? -1 : int64_t(to.slot) * (height * width) + row * width + column;
  }

  // `sums`: fragment `fragment` of N as WGMMA leaves it: sums[4 j + 2 i] and its neighbour are row 8 i + lane / 4,
  // columns 8 j + 2 (lane % 4) and one more. Whole warps call.
  template <bool kTransposed, bool kAccumulate>
  CUTE_DEVICE void store(float (&sums)[kSums], int fragment) const {
    const int64_t offset = __shfl_sync(~0u, offset_, fragment);
    if (offset < 0) return;
    Result* corner = result_ + offset;
    if constexpr (sizeof(Result) != 2) {
      store_wide<kTransposed, kAccumulate>(sums, corner);
    } else {
      CUTE_UNROLL
      for (int part = 0; part < kSums / 8; ++part) store_narrow<kTransposed, kAccumulate>(sums, part, corner);
    }
  }

  CUTE_DEVICE bool transposed() const { return transposed_; }
  CUTE_DEVICE bool accumulates() const { return accumulate_; }

 private:
  // A part is what one store a lane writes, four words of two results. The lanes of a quad write four pieces of row
  // lane / 4 of eight rows, `part`, side by side; or, where there are but two or in a transposed tile, whose rows are
  // N, two (left, right) of the upper eight of 16 rows, then two of the lower. The word that goes to lane `position` of
  // the quad comes from these sums.
  template <bool kTransposed>
  CUTE_DEVICE static constexpr int sum_index(int part, int position) {
    if (kTransposed) return 8 * part + 2 * position;
    return kSums == 16 ? 4 * position + 2 * part : 4 * (position & 1) + 2 * (position >> 1);
  }

  template <bool kTransposed>
  CUTE_DEVICE uint4* address(Result* corner, int part) const {
    const int lane = threadIdx.x % 32, position = lane % 4;
    const bool wide = !kTransposed && kSums == 16;
    const int row = wide ? 8 * part + lane / 4 : 16 * part + 8 * (position >> 1) + lane / 4;
    return reinterpret_cast<uint4*>(corner + row * block_width_ + 8 * (wide ? position : position & 1));
  }

  template <bool kTransposed, bool kAccumulate>
  CUTE_DEVICE void store_narrow(float (&sums)[kSums], int part, Result* corner) const {
    const int lane = threadIdx.x % 32;
    uint4* to = address<kTransposed>(corner, part);
    uint32_t words[4];
    if constexpr (kAccumulate) {
      const uint4 before = __ldcg(to);
      words[0] = before.x, words[1] = before.y, words[2] = before.z, words[3] = before.w;
      transpose_quad(words, lane);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        if constexpr (kTransposed) words[i] = transpose_8x8(words[i]);
        const auto pair = reinterpret_cast<const cutlass::Array<Result, 2>&>(words[i]);
        sums[sum_index<kTransposed>(part, i)] += float(pair[0]);
        sums[sum_index<kTransposed>(part, i) + 1] += float(pair[1]);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int at = sum_index<kTransposed>(part, i);
      const cutlass::Array<float, 2> pair{sums[at], sums[at + 1]};
      const auto packed = cutlass::NumericArrayConverter<Result, float, 2>::convert(pair);
      words[i] = reinterpret_cast<const uint32_t&>(packed);
      if constexpr (kTransposed) words[i] = transpose_8x8(words[i]);
    }
    transpose_quad(words, lane);
    // Not `*to = `, which the compiler cuts into four words here, at 12 µs a tile; nor __stwb, which it leaves as a
    // function, so that WGMMA is serialised.
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }

  template <bool kTransposed, bool kAccumulate>
  CUTE_DEVICE void store_wide(float (&sums)[kSums], Result* corner) const {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    // sums[4 j + 2 i + k]
    const auto address = [&](int j, int i, int k) {
      return kTransposed ? corner + (8 * j + column + k) * block_width_ + 8 * i + row
                         : corner + (8 * i + row) * block_width_ + 8 * j + column + k;
    };
    if constexpr (kAccumulate) {
      // All loads come before the first store: the compiler cannot move them there.
      float before[kSums];
      CUTE_UNROLL
      for (int at = 0; at < kSums; at += kTransposed ? 1 : 2) {
        const float* from = address(at / 4, at / 2 % 2, at % 2);
        if constexpr (kTransposed) {
          before[at] = __ldcg(from);
        } else {
          const float2 pair = __ldcg(reinterpret_cast<const float2*>(from));
          before[at] = pair.x, before[at + 1] = pair.y;
        }
      }
      CUTE_UNROLL
      for (int at = 0; at < kSums; ++at) sums[at] += before[at];
    }
    CUTE_UNROLL
    for (int at = 0; at < kSums; at += kTransposed ? 1 : 2) {
      float* to = address(at / 4, at / 2 % 2, at % 2);
      if constexpr (kTransposed) {
        *to = sums[at];
      } else {
        asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(sums[at]), "f"(sums[at + 1]) : "memory");
      }
    }
  }
};

template <class Config, bool kTransposed, bool kAccumulate, int kSize>
CUTE_DEVICE void back_store_as(const float (&accumulator)[kSize], const BackEpilogue<Config>& epilogue) {
  constexpr int kSums = Config::kFragmentColumns / 2;
  CUTE_UNROLL
  for (int fragment = 0; fragment < kSize / kSums; ++fragment) {
    float sums[kSums];
    CUTE_UNROLL
    for (int i = 0; i < kSums; ++i) sums[i] = accumulator[kSums * fragment + i];
    epilogue.template store<kTransposed, kAccumulate>(sums, fragment);
  }
}

template <class Config, int kSize>
CUTE_DEVICE void back_store(const float (&accumulator)[kSize], const BackEpilogue<Config>& epilogue) {
  if (!epilogue.accumulates()) {
    if (epilogue.transposed()) {
      back_store_as<Config, true, false>(accumulator, epilogue);
    } else {
      back_store_as<Config, false, false>(accumulator, epilogue);
    }
  } else if (epilogue.transposed()) {
    back_store_as<Config, true, true>(accumulator, epilogue);
  } else {
    back_store_as<Config, false, true>(accumulator, epilogue);
  }
}

}  // namespace block_sparse
