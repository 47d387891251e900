// Weight gradient of a share of the stored blocks, over a chunk of the tokens.
#pragma once

#include "epilogue.h"
#include "kernel_table.h"
#include "pack.h"
#include "tile.h"

namespace block_sparse::cpu {

template <class Isa, class Stored>
struct SparseSupportKernel {
  using Real = Accumulate<Stored>;
  static constexpr int64_t kVector = kLanes<Isa, Real>;
  static constexpr int64_t kPanel = 2 * kVector;
  // A panel of dy is one cache line wide and holds the rows of several tiles.
  static constexpr int kRowPanel = 64 / sizeof(Real);
  static constexpr int kWideRows = Isa::kSupportRows;
  static constexpr int kNarrowRows = 2 * Isa::kSupportRows <= kRowPanel ? 2 * Isa::kSupportRows : kRowPanel;

  static void pack_outputs(const void* in, int64_t stride, int64_t begin, int64_t end, int64_t rows, int64_t columns,
                           int64_t side, void* panels) {
    pack_panels<kRowPanel / kVector>(in, stride, begin, end, rows, columns, side, round_up(side, kRowPanel), panels);
  }

  static void pack_inputs(const void* in, int64_t stride, int64_t begin, int64_t end, int64_t rows, int64_t columns,
                          int64_t side, void* panels) {
    pack_panels<kPanel / kVector>(in, stride, begin, end, rows, columns, side, round_up(side, kVector), panels);
  }

  static void run(const SparseSupportProblem& problem, const SparseSupportTask& task) {
    for (int64_t entry = task.entry_begin; entry < task.entry_end; ++entry) {
      multiply_block(problem, task, problem.index.row_slots[entry]);
    }
  }

  // Writes a finished block, unless it has been summed in place, or adds it. Past the matrix edge the sums are products
  // with padding, which a NaN or infinity in x or dy may have reached: zeros go there, and nothing is added.
  static void finish_block(const SparseSupportProblem& problem, int64_t slot, const void* sums, int64_t ldc) {
    if constexpr (sizeof(Result<Stored>) == 2) {
      if (problem.result_dtype == DType::kFloat32) return finish_block_as<float>(problem, slot, sums, ldc);
    }
    finish_block_as<Result<Stored>>(problem, slot, sums, ldc);
  }

 private:
  template <class To>
  static void finish_block_as(const SparseSupportProblem& problem, int64_t slot, const void* sums, int64_t ldc) {
    const Geometry& g = problem.geometry;
    const int64_t row = problem.index.block_coords[2 * slot];
    const int64_t column = problem.index.block_coords[2 * slot + 1];
    const int64_t height = lesser(g.block_height, g.out_features - row * g.block_height);
    const int64_t width = lesser(g.block_width, g.in_features - column * g.block_width);
    To* gradient = static_cast<To*>(problem.values_gradient) + slot * g.block_height * g.block_width;
    for (int64_t m = 0; m < g.block_height; ++m) {
      To* to = gradient + m * g.block_width;
      const Real* from = static_cast<const Real*>(sums) + m * ldc;
      const int64_t valid = m < height ? width : 0;
      if (problem.accumulate) {
        add_row<Isa>(to, from, valid);
        continue;
      }
      if (sums != gradient) copy_row<Isa>(to, from, valid);
      if (valid < g.block_width) std::memset(to + valid, 0, (g.block_width - valid) * sizeof(*to));
    }
  }

  template <int Vectors>
  static void pack_panels(const void* in, int64_t stride, int64_t begin, int64_t end, int64_t rows, int64_t columns,
                          int64_t side, int64_t padded, void* panels) {
    for (int64_t first = 0, line = 0; first < columns; first += side, ++line) {
      const auto* from = static_cast<const Result<Stored>*>(in) + first;
      Real* to = static_cast<Real*>(panels) + line * rows * padded;
      if constexpr (std::is_same_v<Stored, BFloat16Pair>) {
        pack_pair_columns<Isa, Vectors>(from, stride, begin, end, rows, lesser(side, columns - first), padded, to);
      } else {
        pack_columns<Isa, Real, Vectors>(from, stride, begin, end, rows, lesser(side, columns - first), padded, to);
      }
    }
  }

  // Tokens summed while a panel of x stays in the first-level cache.
  static constexpr int64_t kSegment = 128;

  template <int Rows, int Vectors>
  static void multiply_rows(const Real* panel, const BlockOperand& operand, int64_t ldb, Real* c, int64_t ldc,
                            bool accumulate) {
    static_assert(kRowPanel % Rows == 0);
    for (int64_t i = 0; i < kRowPanel; i += Rows) {
      multiply_tile<Isa, Real, Packed<Stored>, Rows, Vectors, kRowPanel>(panel + i, &operand, 1, 0, ldb, panel + i,
                                                                         c + i * ldc, ldc, accumulate);
    }
  }

  static void multiply_block(const SparseSupportProblem& problem, const SparseSupportTask& task, int64_t slot) {
    const Geometry& g = problem.geometry;
    const int64_t row = problem.index.block_coords[2 * slot];
    const int64_t column = problem.index.block_coords[2 * slot + 1];
    const int64_t m_padded = round_up(g.block_height, kRowPanel);
    const int64_t n_padded = round_up(g.block_width, kVector);
    const Real* a = static_cast<const Real*>(task.output_panels) + row * m_padded * task.tokens;
    const Real* b = static_cast<const Real*>(task.input_panels) + column * n_padded * task.tokens;

    Real* sums = static_cast<Real*>(task.scratch);
    if (task.sums) sums = static_cast<Real*>(task.sums) + slot * m_padded * n_padded;
    if constexpr (std::is_same_v<Stored, Real>) {
      if (!problem.accumulate && m_padded == g.block_height && n_padded == g.block_width) {
        sums = static_cast<Real*>(problem.values_gradient) + slot * g.block_height * g.block_width;
      }
    }

    for (int64_t t = 0; t < task.tokens; t += kSegment) {
      const int64_t length = lesser(kSegment, task.tokens - t);
      const bool accumulate = t > 0 || !task.first_chunk;
      for (int64_t n = 0; n < n_padded; n += kPanel) {
        const int64_t width = lesser(kPanel, n_padded - n);
        const BlockOperand operand = {b + n * task.tokens + t * width, 0, length};
        for (int64_t m = 0; m < m_padded; m += kRowPanel) {
          const Real* panel = a + m * task.tokens + t * kRowPanel;
          Real* c = sums + m * n_padded + n;
          if (width == kPanel) {
            multiply_rows<kWideRows, 2>(panel, operand, width, c, n_padded, accumulate);
          } else {
            multiply_rows<kNarrowRows, 1>(panel, operand, width, c, n_padded, accumulate);
          }
        }
      }
    }
    if (task.last_chunk) finish_block(problem, slot, sums, n_padded);
  }
};

}  // namespace block_sparse::cpu
