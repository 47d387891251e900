// Forward and input gradient over a share of the tokens and of the units.
#pragma once

#include "block_lines.h"
#include "epilogue.h"
#include "kernel_table.h"
#include "pack.h"
#include "tile.h"

namespace block_sparse::cpu {

template <class Isa, class Stored>
struct DenseSparseKernel {
  using Real = Accumulate<Stored>;
  static constexpr int64_t kVector = kLanes<Isa, Real>;
  static constexpr int64_t kPanel = 2 * kVector;

  // Blocks no wider than a vector get a taller tile, so that there are enough independent sums.
  static int64_t token_tile(int64_t n) { return n <= kVector ? Isa::kNarrowTokens : Isa::kWideTokens; }

  static void pack_blocks(const DenseSparseProblem& problem, const BlockLines& lines, int64_t begin, int64_t end,
                          void* packed) {
    const int64_t n_padded = round_up(lines.n, kVector);
    for (int64_t entry = begin; entry < end; ++entry) {
      const Stored* block = static_cast<const Stored*>(problem.values) + lines.slots[entry] * lines.n * lines.k;
      Real* panels = static_cast<Real*>(packed) + (entry - begin) * n_padded * lines.k;
      if (problem.direction == Direction::kInputGradient) {
        if constexpr (std::is_same_v<Stored, BFloat16Pair>) {
          pack_pair_columns<Isa, 2>(reinterpret_cast<const BFloat16*>(block), lines.n, 0, lines.k, lines.k, lines.n,
                                    n_padded, panels);
        } else {
          pack_columns<Isa, Real, 2>(block, lines.n, 0, lines.k, lines.k, lines.n, n_padded, panels);
        }
        continue;
      }
      for (int64_t first = 0; first < lines.n; first += kPanel) {
        const int64_t width = lesser(kPanel, n_padded - first);
        transpose_rows<Isa, Real>(block + first * lines.k, lines.k, lesser(width, lines.n - first), lines.k,
                                  panels + first * lines.k, width);
      }
    }
  }

  static void run(const DenseSparseProblem& problem, const BlockLines& lines, const DenseSparseTask& task) {
    if (task.packed) {
      multiply<Packed<Stored>>(problem, lines, task, static_cast<const Packed<Stored>*>(task.packed));
    } else {
      multiply<Stored>(problem, lines, task, static_cast<const Stored*>(problem.values));
    }
  }

 private:
  // The k range summed while a panel of b stays in the first-level cache.
  static constexpr int64_t kSegment = 128;

  template <class B>
  static void multiply(const DenseSparseProblem& problem, const BlockLines& lines, const DenseSparseTask& task,
                       const B* weight) {
    const int64_t tile = token_tile(lines.n);
    const int64_t tokens = task.token_end - task.token_begin;
    Real* a = static_cast<Real*>(task.scratch);                            // [tiles, K, tile]
    Real* sums = a + round_up(tokens * lines.k_total, kVector) + kVector;  // [panels, tokens, kPanel]

    const Stored* input = static_cast<const Stored*>(problem.input) + task.token_begin * problem.input_stride;
    for (int64_t t = 0; t < tokens; t += tile) {
      const int64_t rows = lesser(tile, tokens - t);
      transpose_rows<Isa, Real>(input + t * problem.input_stride, problem.input_stride, rows, lines.k_total,
                                a + t * lines.k_total, rows);
    }

    const int64_t n_padded = round_up(lines.n, kVector);
    const int64_t panels = (n_padded + kPanel - 1) / kPanel;
    for (int64_t line = task.begin.line; line <= task.end.line; ++line) {
      const int64_t panel_begin = line == task.begin.line ? task.begin.panel : 0;
      const int64_t panel_end = line == task.end.line ? task.end.panel : panels;
      if (panel_begin < panel_end) {
        multiply_line(problem, lines, task, weight, line, panel_begin, panel_end, a, sums);
      }
    }
  }

  template <class B>
  static void multiply_line(const DenseSparseProblem& problem, const BlockLines& lines, const DenseSparseTask& task,
                            const B* weight, int64_t line, int64_t panel_begin, int64_t panel_end, const Real* a,
                            Real* sums) {
    const int64_t tile = token_tile(lines.n);
    const int64_t tokens = task.token_end - task.token_begin;
    const int64_t n_padded = round_up(lines.n, kVector);
    const int64_t block_elements = task.packed ? n_padded * lines.k : lines.n * lines.k;
    const int64_t n_begin = line * lines.n;
    const int64_t n_valid = lesser(lines.n, lines.n_total - n_begin);
    Result<Stored>* output = static_cast<Result<Stored>*>(problem.output) + task.token_begin * lines.n_total + n_begin;
    const Result<Stored>* bias = problem.bias ? static_cast<const Result<Stored>*>(problem.bias) + n_begin : nullptr;
    // Whole vectors of the accumulation type are summed where they are wanted, everything else in scratch.
    const bool in_place = std::is_same_v<Stored, Real> && n_valid == n_padded;

    const auto sums_of = [&](int64_t panel) {
      if constexpr (std::is_same_v<Stored, Real>) {
        if (in_place) return output + panel * kPanel;
      }
      return sums + (panel - panel_begin) * tokens * kPanel;
    };
    const int64_t ldc = in_place ? lines.n_total : kPanel;

    // Sums that one segment completes need not wait in memory to be rounded.
    const int64_t line_length = (lines.offsets[line + 1] - lines.offsets[line]) * lines.k;
    if constexpr (std::is_same_v<B, BFloat16Pair>) {
      if (line_length <= kSegment && n_valid == n_padded && problem.activation == Activation::kNone) {
        return multiply_short_line(lines, task, weight, line, panel_begin, panel_end, a, bias, output);
      }
    }

    BlockOperand operands[kSegment];
    const int64_t line_end = lines.offsets[line + 1];
    int64_t entry = lines.offsets[line];
    bool accumulate = false;
    do {
      int64_t count = 0;
      for (int64_t k = 0; entry < line_end && (count == 0 || k + lines.k <= kSegment); ++entry, ++count) {
        const int64_t k_offset = lines.partners[entry] * lines.k;
        const int64_t place = task.packed ? entry - task.packed_first : lines.slots[entry];
        operands[count] = {weight + place * block_elements, k_offset, lesser(lines.k, lines.k_total - k_offset)};
        k += lines.k;
      }
      for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        const int64_t width = lesser(kPanel, n_padded - panel * kPanel);
        const int64_t b_offset = panel * kPanel * (task.packed ? lines.k : 1);
        const int64_t ldb = task.packed ? width : lines.n;
        Real* c = sums_of(panel);
        for (int64_t t = 0; t < tokens; t += tile) {
          const int64_t rows = lesser(tile, tokens - t);
          const auto kernel = width == kPanel ? kTokenTiles<Isa, Real, B, 2, Isa::kWideTokens>.kernels[rows - 1]
                                              : kTokenTiles<Isa, Real, B, 1, Isa::kNarrowTokens>.kernels[rows - 1];
          const Real* panel_a = a + t * lines.k_total;
          kernel(panel_a, operands, count, b_offset, ldb, panel_a + rows * lines.k_total, c + t * ldc, ldc, accumulate);
        }
      }
      accumulate = true;
    } while (entry < line_end);

    if (in_place && !bias && problem.activation == Activation::kNone) return;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const int64_t first = panel * kPanel;
      if (first >= n_valid) break;
      finish<Isa, Real>(problem.activation, sums_of(panel), ldc, bias ? bias + first : nullptr, output + first,
                        lines.n_total, tokens, lesser(kPanel, n_valid - first));
    }
  }

  // All blocks of a line, whole vectors of outputs, no activation.
  static void multiply_short_line(const BlockLines& lines, const DenseSparseTask& task, const BFloat16Pair* weight,
                                  int64_t line, int64_t panel_begin, int64_t panel_end, const Real* a,
                                  const BFloat16* bias, BFloat16* output) {
    const int64_t tile = token_tile(lines.n);
    const int64_t tokens = task.token_end - task.token_begin;
    BlockOperand operands[kSegment];
    const int64_t first = lines.offsets[line], count = lines.offsets[line + 1] - first;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t k_offset = lines.partners[first + i] * lines.k;
      operands[i] = {weight + (first + i - task.packed_first) * lines.n * lines.k, k_offset,
                     lesser(lines.k, lines.k_total - k_offset)};
    }
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const int64_t column = panel * kPanel;
      const int64_t width = lesser(kPanel, lines.n - column);
      Real shift[kPanel] = {};
      if (bias) copy_row<Isa>(shift, bias + column, width);
      for (int64_t t = 0; t < tokens; t += tile) {
        const int64_t rows = lesser(tile, tokens - t);
        const auto kernel = width == kPanel ? kFinalTokenTiles<Isa, Stored, 2, Isa::kWideTokens>.kernels[rows - 1]
                                            : kFinalTokenTiles<Isa, Stored, 1, Isa::kNarrowTokens>.kernels[rows - 1];
        const Real* panel_a = a + t * lines.k_total;
        kernel(panel_a, operands, count, column * lines.k, width, panel_a + rows * lines.k_total,
               output + t * lines.n_total + column, lines.n_total, shift);
      }
    }
  }
};

}  // namespace block_sparse::cpu
