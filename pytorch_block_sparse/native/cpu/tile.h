// The register tile: every product of the CPU back end ends here.
#pragma once

#include <utility>

#include "vector.h"

namespace block_sparse::cpu {

// One block as the k-major operand b of a tile: row k of it is at b + k * ldb.
struct BlockOperand {
  const void* b;     // [k, ldb]
  int64_t k_offset;  // where its k range starts in the panel a
  int64_t k;         // valid k, less than the block's side at the matrix edge
};

// sum + a b. Of pairs, a is the bits of one, and both products are added.
template <class Isa, class Stored, class Real>
[[gnu::always_inline]] inline Vector<Isa, Real> add_product(Vector<Isa, Real> sum, Real a, Vector<Isa, Real> b) {
  if constexpr (std::is_same_v<Stored, BFloat16Pair>) {
    return Isa::add_pair_product(sum, a, b);
  } else {
    return sum + a * b;
  }
}

// The sums over blocks and k of a[k, m] b[k, n], for M values of m and Vectors vectors of n, handed to write(m, v,
// sum). a: [K, kLda] panel. An element is summed in the order of k, whatever the tile's shape. Blocks lie scattered in
// memory and are too short for the hardware to predict, so the block after the current one is prefetched; a_next is the
// panel that the next call reads.
template <class Isa, class Real, class Stored, int M, int Vectors, int kLda, class Write>
[[gnu::always_inline]] inline void sum_tile(const Real* a, const BlockOperand* blocks, int64_t count, int64_t b_offset,
                                            int64_t ldb, const Real* a_next, Write write) {
  using V = Vector<Isa, Real>;
  constexpr int64_t lanes = kLanes<Isa, Real>;
  V sum[M][Vectors];
#pragma GCC unroll 32
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sum[m][v] = V{};
  }
  for (const BlockOperand* block = blocks; block != blocks + count; ++block) {
    const Real* ak = a + block->k_offset * kLda;
    const Stored* bk = static_cast<const Stored*>(block->b) + b_offset;
    const bool last = block + 1 == blocks + count;
    const BlockOperand* next = last ? blocks : block + 1;
    const Real* next_a = (last ? a_next : a) + next->k_offset * kLda;
    const Stored* next_b = static_cast<const Stored*>(next->b) + b_offset;
    for (int64_t k = block->k; k > 0; --k, ak += kLda, bk += ldb, next_a += kLda, next_b += ldb) {
      __builtin_prefetch(next_a);
      __builtin_prefetch(next_b);
      V b[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) b[v] = load<Isa, Real>(bk + v * lanes);
#pragma GCC unroll 32
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sum[m][v] = add_product<Isa, Stored>(sum[m][v], ak[m], b[v]);
      }
    }
  }
#pragma GCC unroll 32
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) write(m, v, sum[m][v]);
  }
}

// c[m, n] (+)= the sums. c: [M, ldc]. What c already holds is added last: sums of short ranges round less than one long
// sum.
template <class Isa, class Real, class Stored, int M, int Vectors, int kLda>
void multiply_tile(const Real* a, const BlockOperand* blocks, int64_t count, int64_t b_offset, int64_t ldb,
                   const Real* a_next, Real* c, int64_t ldc, bool accumulate) {
  constexpr int64_t lanes = kLanes<Isa, Real>;
  sum_tile<Isa, Real, Stored, M, Vectors, kLda>(
      a, blocks, count, b_offset, ldb, a_next, [=](int m, int v, Vector<Isa, Real> sum) __attribute__((always_inline)) {
        Real* to = c + m * ldc + v * lanes;
        store<Isa, Real>(to, accumulate ? load<Isa, Real>(to) + sum : sum);
      });
}

// out[m, n] = the sums + bias[n], rounded straight from the registers. out: [M, ldo]; bias: whole vectors.
template <class Isa, class Real, class Stored, int M, int Vectors, int kLda>
void multiply_final_tile(const Real* a, const BlockOperand* blocks, int64_t count, int64_t b_offset, int64_t ldb,
                         const Real* a_next, Result<Stored>* out, int64_t ldo, const Real* bias) {
  constexpr int64_t lanes = kLanes<Isa, Real>;
  sum_tile<Isa, Real, Stored, M, Vectors, kLda>(
      a, blocks, count, b_offset, ldb, a_next, [=](int m, int v, Vector<Isa, Real> sum) __attribute__((always_inline)) {
        store<Isa, Real>(out + m * ldo + v * lanes, sum + load<Isa, Real>(bias + v * lanes));
      });
}

template <class Real>
using TileKernel = void (*)(const Real* a, const BlockOperand* blocks, int64_t count, int64_t b_offset, int64_t ldb,
                            const Real* a_next, Real* c, int64_t ldc, bool accumulate);

// Tiles of 1 .. Tokens tokens, whose panels are as wide as the tile is high.
template <class Isa, class Real, class Stored, int Vectors, int Tokens>
struct TokenTiles {
  TileKernel<Real> kernels[Tokens];

  template <int... M>
  static constexpr TokenTiles make(std::integer_sequence<int, M...>) {
    return {{&multiply_tile<Isa, Real, Stored, M + 1, Vectors, M + 1>...}};
  }
};

template <class Isa, class Real, class Stored, int Vectors, int Tokens>
inline constexpr auto kTokenTiles =
    TokenTiles<Isa, Real, Stored, Vectors, Tokens>::make(std::make_integer_sequence<int, Tokens>{});

template <class Isa, class Stored, int Vectors, int Tokens>
struct FinalTokenTiles {
  using Kernel = void (*)(const float* a, const BlockOperand* blocks, int64_t count, int64_t b_offset, int64_t ldb,
                          const float* a_next, Result<Stored>* out, int64_t ldo, const float* bias);
  Kernel kernels[Tokens];

  template <int... M>
  static constexpr FinalTokenTiles make(std::integer_sequence<int, M...>) {
    return {{&multiply_final_tile<Isa, float, Stored, M + 1, Vectors, M + 1>...}};
  }
};

template <class Isa, class Stored, int Vectors, int Tokens>
inline constexpr auto kFinalTokenTiles =
    FinalTokenTiles<Isa, Stored, Vectors, Tokens>::make(std::make_integer_sequence<int, Tokens>{});

}  // namespace block_sparse::cpu
