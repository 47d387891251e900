// Forward of few tokens: dot products along the rows of the blocks, which are read once and never copied.
#pragma once

#include "block_lines.h"
#include "epilogue.h"
#include "kernel_table.h"

namespace block_sparse::cpu {

template <class Isa, class Stored>
struct FewTokensKernel {
  using Real = Accumulate<Stored>;
  using V = Vector<Isa, Real>;
  static constexpr int64_t kVector = kLanes<Isa, Real>;
  static constexpr int64_t kPanel = 2 * kVector;
  static constexpr int kTokens = 3;
  static constexpr int kOutputs = 4;

  static void run(const DenseSparseProblem& problem, const BlockLines& lines, const DenseSparseTask& task,
                  const void* x, int64_t stride) {
    const int64_t panels = (round_up(lines.n, kVector) + kPanel - 1) / kPanel;
    for (int64_t line = task.begin.line; line <= task.end.line; ++line) {
      const int64_t panel_begin = line == task.begin.line ? task.begin.panel : 0;
      const int64_t panel_end = line == task.end.line ? task.end.panel : panels;
      for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        multiply_panel(problem, lines, task, line, panel, static_cast<const Real*>(x), stride);
      }
    }
  }

 private:
  static void multiply_panel(const DenseSparseProblem& problem, const BlockLines& lines, const DenseSparseTask& task,
                             int64_t line, int64_t panel, const Real* x, int64_t stride) {
    const int64_t n_begin = line * lines.n + panel * kPanel;
    const int64_t n_valid = lesser(kPanel, lesser((line + 1) * lines.n, lines.n_total) - n_begin);
    if (n_valid <= 0) return;
    Real* sums = static_cast<Real*>(task.scratch);  // [T, kPanel]
    for (int64_t n = 0; n < n_valid;) {
      const int64_t outputs = n + kOutputs <= n_valid ? kOutputs : 1;
      for (int64_t t = 0; t < problem.tokens;) {
        const int64_t tokens = t + kTokens <= problem.tokens ? kTokens : 1;
        const auto kernel = outputs == kOutputs ? (tokens == kTokens ? &dot<kTokens, kOutputs> : &dot<1, kOutputs>)
                                                : (tokens == kTokens ? &dot<kTokens, 1> : &dot<1, 1>);
        kernel(problem, lines, line, panel * kPanel + n, x + t * stride, stride, sums + t * kPanel + n);
        t += tokens;
      }
      n += outputs;
    }
    const Stored* bias = static_cast<const Stored*>(problem.bias);
    finish<Isa, Real>(problem.activation, sums, kPanel, bias ? bias + n_begin : nullptr,
                      static_cast<Stored*>(problem.output) + n_begin, lines.n_total, problem.tokens, n_valid);
  }

  // sums[t, n] = sum over the blocks of a line of x[t, k] w[n, k], for outputs row, row + 1, ... of the blocks.
  template <int Tokens, int Outputs>
  static void dot(const DenseSparseProblem& problem, const BlockLines& lines, int64_t line, int64_t row, const Real* x,
                  int64_t stride, Real* sums) {
    V sum[Tokens][Outputs] = {};
    const auto add = [&](const auto& load_x, const auto& load_w) {
      V xs[Tokens];
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) xs[t] = load_x(t);
#pragma GCC unroll 4
      for (int o = 0; o < Outputs; ++o) {
        const V w = load_w(o);
#pragma GCC unroll 4
        for (int t = 0; t < Tokens; ++t) sum[t][o] += xs[t] * w;
      }
    };
    for (int64_t entry = lines.offsets[line]; entry < lines.offsets[line + 1]; ++entry) {
      const int64_t k_offset = lines.partners[entry] * lines.k;
      const int64_t k_valid = lesser(lines.k, lines.k_total - k_offset);
      const Stored* w = static_cast<const Stored*>(problem.values) + (lines.slots[entry] * lines.n + row) * lines.k;
      const Real* xk = x + k_offset;
      // The next outputs of this block are read when the line has been walked once more: long enough to fetch them, and
      // nothing else would, because the walk skips from block to block.
      const char* next = reinterpret_cast<const char*>(w + Outputs * lines.k);
      for (int64_t byte = 0; byte < Outputs * lines.k * static_cast<int64_t>(sizeof(Stored)); byte += 64) {
        __builtin_prefetch(next + byte);
      }
      int64_t k = 0;
      for (; k + kVector <= k_valid; k += kVector) {
        add([&](int t) { return load<Isa, Real>(xk + t * stride + k); },
            [&](int o) { return load<Isa, Real>(w + o * lines.k + k); });
      }
      if (k < k_valid) {
        add([&](int t) { return load_partial<Isa, Real>(xk + t * stride + k, k_valid - k); },
            [&](int o) { return load_partial<Isa, Real>(w + o * lines.k + k, k_valid - k); });
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
      for (int o = 0; o < Outputs; ++o) {
        Real total = 0;
        for (int lane = 0; lane < kVector; ++lane) total += sum[t][o][lane];
        sums[t * kPanel + o] = total;
      }
    }
  }
};

}  // namespace block_sparse::cpu
