// Operands of the bfloat16 matrix units: pairs of consecutive k are neighbours, [K / 2, N, 2].
#pragma once

#include "pack.h"
#include "vector.h"

namespace block_sparse::cpu {

template <class Isa>
struct Vnni {
  static constexpr int kLanes = cpu::kLanes<Isa, float>;

  // in: [n, k] row-major; out: [k / 2, n, 2]. n is a multiple of a vector, k is even. A pair is moved as one float.
  static void transpose_block(const BFloat16* in, int64_t n, int64_t k, BFloat16* out) {
    transpose_rows<Isa, float>(reinterpret_cast<const float*>(in), k / 2, n, k / 2, reinterpret_cast<float*>(out), n);
  }

  // in: [k, ldi] row-major with `columns` valid, `rows` of them valid; out: [k / 2, n, 2], zero past them.
  static void interleave_rows(const BFloat16* in, int64_t ldi, int64_t rows, int64_t columns, int64_t k, int64_t n,
                              BFloat16* out) {
    for (int64_t row = 0; row < k; row += 2) {
      for (int64_t column = 0; column < n; column += kLanes, out += 2 * kLanes) {
        store_bits(out, row_pairs<Isa>(in + row * ldi + column, ldi, rows - row, columns - column));
      }
    }
  }

  // in: [k, ldi] as above; out: [n, ldo] transposed, k values in a row, zero past them. k is a multiple of two vectors.
  static void transpose_columns(const BFloat16* in, int64_t ldi, int64_t rows, int64_t columns, int64_t k, int64_t n,
                                BFloat16* out, int64_t ldo) {
    for (int64_t column = 0; column < n; column += kLanes) {
      for (int64_t row = 0; row < k; row += 2 * kLanes) {
        Bits<Isa> square[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) {
          const int64_t at = row + 2 * i;
          square[i] = row_pairs<Isa>(in + at * ldi + column, ldi, rows - at, columns - column);
        }
        transpose<kLanes / 2>(square);
        for (int64_t i = 0; i < kLanes; ++i) store_bits(out + (column + i) * ldo + row, square[i]);
      }
    }
  }

 private:
  static void store_bits(BFloat16* out, Bits<Isa> v) {
    store<Isa, float>(reinterpret_cast<float*>(out), (Floats<Isa>)v);
  }
};

}  // namespace block_sparse::cpu
