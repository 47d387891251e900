// Copies of the operands in the order in which tiles read them, in the accumulation type.
#pragma once

#include "vector.h"

namespace block_sparse::cpu {

// out[column * ldo + row] = in[row * ldi + column]: a transposition in squares of one vector.
// `out` is written in whole vectors, so each column may spill up to lanes - 1 elements past `rows`: columns are written
// in ascending order and groups of rows in descending order, so that a spill is overwritten by its owner. The caller
// leaves one vector of slack at the end.
template <class Isa, class Real, class Stored>
void transpose_rows(const Stored* in, int64_t ldi, int64_t rows, int64_t columns, Real* out, int64_t ldo) {
  constexpr int lanes = kLanes<Isa, Real>;
  for (int64_t row = (rows - 1) / lanes * lanes; row >= 0; row -= lanes) {
    const int64_t height = lesser(lanes, rows - row);
    for (int64_t column = 0; column < columns; column += lanes) {
      const int64_t width = lesser(lanes, columns - column);
      Vector<Isa, Real> square[lanes];
      for (int i = 0; i < lanes; ++i) {
        const Stored* p = in + (row + lesser(i, height - 1)) * ldi + column;
        square[i] = width == lanes ? load<Isa, Real>(p) : load_partial<Isa, Real>(p, width);
      }
      transpose<lanes / 2>(square);
      for (int64_t i = 0; i < width; ++i) store<Isa, Real>(out + (column + i) * ldo + row, square[i]);
    }
  }
}

// Rows of whole vectors. in: [rows, ldi]; out: [rows, Vectors * lanes].
template <class Isa, class Real, int Vectors, class Stored>
void pack_whole(const Stored* in, int64_t ldi, int64_t rows, Real* out) {
  constexpr int64_t lanes = kLanes<Isa, Real>;
  for (int64_t row = 0; row < rows; ++row, in += ldi, out += Vectors * lanes) {
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) store<Isa, Real>(out + v * lanes, load<Isa, Real>(in + v * lanes));
  }
}

// Rows [begin, end) of `in` cut into column panels: out[panel, row, column in panel].
// in: [rows, ldi], `columns` of them valid. out: `padded` columns (whole vectors), zero from `columns` on, in panels of
// `rows` rows that are Vectors vectors wide except the last.
template <class Isa, class Real, int Vectors, class Stored>
void pack_columns(const Stored* in, int64_t ldi, int64_t begin, int64_t end, int64_t rows, int64_t columns,
                  int64_t padded, Real* out) {
  constexpr int64_t lanes = kLanes<Isa, Real>;
  constexpr int64_t width = Vectors * lanes;
  for (int64_t first = 0; first < padded; first += width) {
    if (first + width <= columns) {
      pack_whole<Isa, Real, Vectors>(in + begin * ldi + first, ldi, end - begin, out + first * rows + begin * width);
      continue;
    }
    const int64_t panel_width = lesser(width, padded - first);
    const int64_t valid = lesser(panel_width, columns - first);
    for (int64_t row = begin; row < end; ++row) {
      Real* to = out + first * rows + row * panel_width;
      for (int64_t j = 0; j < panel_width; ++j) to[j] = 0;
      if (valid > 0) copy_row<Isa>(to, in + row * ldi + first, valid);
    }
  }
}

// One vector of columns of two rows, as pairs. `columns` are valid from `in` on, and `rows` of the two; the rest is
// zero.
template <class Isa>
[[gnu::always_inline]] inline Bits<Isa> row_pairs(const BFloat16* in, int64_t ldi, int64_t rows, int64_t columns) {
  constexpr int64_t lanes = kLanes<Isa, float>;
  const auto row_bits = [](const BFloat16* row, int64_t count) {
    if (count >= lanes) return load_half_bits<Isa>(row);
    BFloat16 part[lanes] = {};
    if (count > 0) std::memcpy(part, row, count * sizeof(BFloat16));
    return load_half_bits<Isa>(part);
  };
  return row_bits(in, rows > 0 ? columns : 0) | (row_bits(in + ldi, rows > 1 ? columns : 0) << 16);
}

// The same with two rows in one: row r of the panels is the pairs of rows 2 r and 2 r + 1 of `in`, and begin, end and
// rows count pairs.
template <class Isa, int Vectors>
void pack_pair_columns(const BFloat16* in, int64_t ldi, int64_t begin, int64_t end, int64_t rows, int64_t columns,
                       int64_t padded, float* out) {
  constexpr int64_t lanes = kLanes<Isa, float>;
  constexpr int64_t width = Vectors * lanes;
  for (int64_t first = 0; first < padded; first += width) {
    const int64_t panel_width = lesser(width, padded - first);
    for (int64_t row = begin; row < end; ++row) {
      const BFloat16* even = in + 2 * row * ldi + first;
      float* to = out + first * rows + row * panel_width;
      for (int64_t j = 0; j < panel_width; j += lanes) {
        store<Isa, float>(to + j, (Floats<Isa>)row_pairs<Isa>(even + j, ldi, 2, columns - first - j));
      }
    }
  }
}

}  // namespace block_sparse::cpu
