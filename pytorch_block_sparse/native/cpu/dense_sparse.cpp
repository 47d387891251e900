// Forward and input gradient: chooses how the blocks are read and divides the work among the threads.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "brgemm.h"
#include "capability.h"
#include "cpu_kernels.h"
#include "workspace.h"

namespace block_sparse::cpu {

namespace {

// Below this, copying the blocks costs more than it saves.
constexpr int64_t kFewTokens = 8;
// Tokens whose input one thread keeps packed at a time: bounded by the cache that this much of the input fills.
constexpr int64_t kChunkTokens = 96;
constexpr int64_t kChunkBytes = 2 << 20;
constexpr int64_t kPackedBytes = 8 << 20;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t piece_begin(int64_t total, int64_t part, int64_t parts) { return total * part / parts; }

struct Split {
  int64_t chunks;  // of tokens
  int64_t shares;  // of the units
};

// Enough tasks for all threads: first by tokens, which needs no repeated packing of the input, then by outputs.
Split split(int64_t tiles, int64_t tile, int64_t k_total, int64_t accumulate_bytes, int64_t units, int64_t threads) {
  const int64_t bound = std::clamp(kChunkBytes / (k_total * accumulate_bytes), int64_t{24}, kChunkTokens);
  const int64_t tiles_in_chunk = std::max<int64_t>(1, bound / tile);
  int64_t chunks = divide_up(tiles, tiles_in_chunk);
  if (chunks >= threads) return {std::min(tiles, divide_up(chunks, threads) * threads), 1};
  return {chunks, std::min(units, divide_up(threads, chunks))};
}

void run_few_tokens(const DenseSparseProblem& problem, const BlockLines& lines, const KernelTable& table) {
  const int64_t panels = divide_up(lines.n, table.panel);
  const int64_t shares = std::min<int64_t>(lines.lines * panels, at::get_num_threads());
  const bool converts = problem.dtype == DType::kBFloat16 || problem.dtype == DType::kFloat16;
  const int64_t x_bytes = converts ? Workspace::padded(problem.tokens * lines.k_total * table.accumulate_bytes) : 0;
  const int64_t scratch_bytes = Workspace::padded(problem.tokens * table.panel * table.accumulate_bytes);
  const Workspace workspace(x_bytes + shares * scratch_bytes);

  const void* x = problem.input;
  int64_t stride = problem.input_stride;
  if (converts) {
    table.convert_rows(problem.input, problem.input_stride, problem.tokens, lines.k_total, workspace.at(0));
    x = workspace.at(0);
    stride = lines.k_total;
  }
  at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t share = begin; share < end; ++share) {
      DenseSparseTask task{};
      task.token_end = problem.tokens;
      task.begin = share_begin(lines, panels, 0, lines.lines, share, shares);
      task.end = share_begin(lines, panels, 0, lines.lines, share + 1, shares);
      task.scratch = workspace.at(x_bytes + share * scratch_bytes);
      table.few_tokens(problem, lines, task, x, stride);
    }
  });
}

}  // namespace

namespace {

// Whether the sum can run over pairs: rows of the input and blocks must hold whole ones.
bool pairs_take(const DenseSparseProblem& problem, const BlockLines& lines) {
  return problem.dtype == DType::kBFloat16 && pair_kernels() && problem.tokens > kFewTokens && lines.k % 2 == 0 &&
         lines.k_total % 2 == 0;
}

// The rows of an input of 2-byte elements next to each other.
Workspace copy_rows(const DenseSparseProblem& problem, int64_t k_total) {
  constexpr int64_t kElementBytes = 2;
  Workspace copy(problem.tokens * k_total * kElementBytes);
  const auto* input = static_cast<const std::byte*>(problem.input);
  at::parallel_for(0, problem.tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::memcpy(copy.at(t * k_total * kElementBytes), input + t * problem.input_stride * kElementBytes,
                  k_total * kElementBytes);
    }
  });
  return copy;
}

}  // namespace

void dense_sparse(const DenseSparseProblem& whole_problem) {
  DenseSparseProblem problem = whole_problem;
  BlockLines lines = block_lines(problem);
  if (problem.tokens == 0 || lines.lines == 0) return;
  if (brgemm_takes(problem)) return brgemm_dense_sparse(problem);
  const bool pairs = pairs_take(problem, lines);
  std::optional<Workspace> copy;
  if (pairs) {
    if (problem.input_stride % 2 != 0) {  // a copy, so that the result does not depend on the stride
      copy = copy_rows(problem, lines.k_total);
      problem.input = copy->at(0);
      problem.input_stride = lines.k_total;
    }
    problem.input_stride /= 2;
    lines.k /= 2;
    lines.k_total /= 2;
  }
  const KernelTable& table = pairs ? *pair_kernels() : kernels(problem.dtype);
  const bool whole_vectors = lines.n % table.lanes == 0;
  const bool few_tokens = problem.tokens <= kFewTokens;
  if (problem.direction == Direction::kForward && few_tokens) return run_few_tokens(problem, lines, table);

  const bool converts = problem.dtype == DType::kBFloat16 || problem.dtype == DType::kFloat16;
  const bool packs = problem.direction == Direction::kForward || !whole_vectors || (converts && !few_tokens);

  const int64_t tile = table.token_tile(lines.n);
  const int64_t tiles = divide_up(problem.tokens, tile);
  const int64_t panels = divide_up(lines.n, table.panel);
  const Split parts =
      split(tiles, tile, lines.k_total, table.accumulate_bytes, lines.lines * panels, at::get_num_threads());
  const int64_t tasks = parts.chunks * parts.shares;
  const int64_t threads = std::min<int64_t>(tasks, at::get_num_threads());

  const int64_t chunk_tokens = divide_up(tiles, parts.chunks) * tile;
  const int64_t scratch_bytes = Workspace::padded(
      (chunk_tokens * lines.k_total + 2 * table.lanes + chunk_tokens * panels * table.panel) * table.accumulate_bytes);
  const int64_t block_bytes = divide_up(lines.n, table.lanes) * table.lanes * lines.k * table.accumulate_bytes;
  const int64_t budget = std::max<int64_t>(kPackedBytes / block_bytes, 1);

  // Lines are taken in groups, so that the copy of the blocks stays bounded.
  std::vector<int64_t> groups{0};
  int64_t largest = 0;
  for (int64_t line = 1; line <= lines.lines; ++line) {
    const bool full = packs && lines.offsets[line] - lines.offsets[groups.back()] > budget && line - 1 > groups.back();
    if (full) groups.push_back(line - 1);
    largest = std::max<int64_t>(largest, lines.offsets[line] - lines.offsets[groups.back()]);
  }
  groups.push_back(lines.lines);

  const int64_t packed_bytes = packs ? Workspace::padded(largest * block_bytes) : 0;
  const Workspace workspace(packed_bytes + threads * scratch_bytes);

  for (size_t group = 0; group + 1 < groups.size(); ++group) {
    const int64_t first = groups[group], last = groups[group + 1];
    const int64_t entry_first = lines.offsets[first];
    if (packs) {
      at::parallel_for(entry_first, lines.offsets[last], 1, [&](int64_t begin, int64_t end) {
        table.pack_blocks(problem, lines, begin, end, workspace.at((begin - entry_first) * block_bytes));
      });
    }
    at::parallel_for(0, threads, 1, [&](int64_t thread_begin, int64_t thread_end) {
      for (int64_t thread = thread_begin; thread < thread_end; ++thread) {
        for (int64_t i = piece_begin(tasks, thread, threads); i < piece_begin(tasks, thread + 1, threads); ++i) {
          const int64_t chunk = i / parts.shares, share = i % parts.shares;
          DenseSparseTask task{};
          task.token_begin = piece_begin(tiles, chunk, parts.chunks) * tile;
          task.token_end = std::min(problem.tokens, piece_begin(tiles, chunk + 1, parts.chunks) * tile);
          task.begin = share_begin(lines, panels, first, last, share, parts.shares);
          task.end = share_begin(lines, panels, first, last, share + 1, parts.shares);
          task.packed = packs ? workspace.at(0) : nullptr;
          task.packed_first = entry_first;
          task.scratch = workspace.at(packed_bytes + thread * scratch_bytes);
          table.dense_sparse(problem, lines, task);
        }
      }
    });
  }
}

}  // namespace block_sparse::cpu
