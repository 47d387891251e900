// Weight gradient: packs both operands a chunk of tokens at a time and divides the blocks among the threads.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "brgemm.h"
#include "capability.h"
#include "cpu_kernels.h"
#include "workspace.h"

namespace block_sparse::cpu {

namespace {

// Packed operands of one chunk: small enough to stay in the caches until they are read.
constexpr int64_t kChunkBytes = 5 << 20;
constexpr int64_t kPairChunkBytes = 3 << 20;  // their products take less time, so more of it is cache misses
constexpr int64_t kFewestTokens = 128;
constexpr int64_t kMostTokens = 1024;
// Rows packed side by side: few enough that rows which share a cache set do not evict each other.
constexpr int64_t kPackTokens = 8;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t element_bytes(DType dtype) {
  if (dtype == DType::kFloat64) return 8;
  return dtype == DType::kFloat32 ? 4 : 2;
}

}  // namespace

void sparse_support(const SparseSupportProblem& whole_problem) {
  SparseSupportProblem problem = whole_problem;
  const Geometry& g = problem.geometry;
  const int64_t bytes = element_bytes(problem.dtype);
  if (g.nnz == 0) return;
  if (problem.tokens == 0) {
    if (!problem.accumulate) {
      std::memset(problem.values_gradient, 0,
                  g.nnz * g.block_height * g.block_width * element_bytes(problem.result_dtype));
    }
    return;
  }
  if (brgemm_takes(problem)) return brgemm_sparse_support(problem);

  // Pairs of tokens: half as many rows, each two rows long.
  const bool pairs = problem.dtype == DType::kBFloat16 && pair_kernels() && problem.tokens % 2 == 0;
  const KernelTable& table = pairs ? *pair_kernels() : kernels(problem.dtype);
  if (pairs) problem.tokens /= 2;
  const int64_t rows_of_token = pairs ? 2 : 1;
  const int64_t chunk_bytes = pairs ? kPairChunkBytes : kChunkBytes;
  const int64_t height = divide_up(g.block_height, table.row_panel) * table.row_panel;
  const int64_t width = divide_up(g.block_width, table.lanes) * table.lanes;
  const int64_t token_bytes = (g.grid_rows() * height + g.grid_cols() * width) * table.accumulate_bytes;
  const int64_t chunks = divide_up(problem.tokens, std::clamp(chunk_bytes / token_bytes, kFewestTokens, kMostTokens));
  const auto chunk_begin = [&](int64_t chunk) { return problem.tokens * chunk / chunks; };
  const int64_t chunk_tokens = divide_up(problem.tokens, chunks);
  const int64_t threads = at::get_num_threads();

  // Added to what is there only once, at the end: fewer roundings, and those of a weight gradient by itself.
  const bool in_place =
      !problem.accumulate && bytes == table.accumulate_bytes && height == g.block_height && width == g.block_width;
  const bool keeps_sums = chunks > 1 && !in_place;
  const int64_t block_bytes = Workspace::padded(height * width * table.accumulate_bytes);
  const int64_t output_bytes = Workspace::padded(g.grid_rows() * height * chunk_tokens * table.accumulate_bytes);
  const int64_t input_bytes = Workspace::padded(g.grid_cols() * width * chunk_tokens * table.accumulate_bytes);
  const int64_t buffers = chunks > 1 ? 2 : 1;
  const int64_t sums_bytes = keeps_sums ? g.nnz * height * width * table.accumulate_bytes : threads * block_bytes;
  const Workspace workspace(buffers * (output_bytes + input_bytes) + sums_bytes);
  const auto output_panels = [&](int64_t chunk) { return workspace.at(chunk % 2 * (output_bytes + input_bytes)); };
  const auto input_panels = [&](int64_t chunk) { return output_panels(chunk) + output_bytes; };
  std::byte* sums = workspace.at(buffers * (output_bytes + input_bytes));

  const auto pack = [&](int64_t chunk, int64_t thread) {
    const int64_t tokens = chunk_begin(chunk + 1) - chunk_begin(chunk);
    const std::byte* dy = static_cast<const std::byte*>(problem.output_gradient) +
                          chunk_begin(chunk) * rows_of_token * problem.output_gradient_stride * bytes;
    const std::byte* x = static_cast<const std::byte*>(problem.input) +
                         chunk_begin(chunk) * rows_of_token * problem.input_stride * bytes;
    const int64_t end = tokens * (thread + 1) / threads;
    for (int64_t row = tokens * thread / threads; row < end; row += kPackTokens) {
      const int64_t row_end = std::min(end, row + kPackTokens);
      table.pack_outputs(dy, problem.output_gradient_stride, row, row_end, tokens, g.out_features, g.block_height,
                         output_panels(chunk));
      table.pack_inputs(x, problem.input_stride, row, row_end, tokens, g.in_features, g.block_width,
                        input_panels(chunk));
    }
  };
  const auto multiply = [&](int64_t chunk, int64_t thread) {
    SparseSupportTask task{};
    task.tokens = chunk_begin(chunk + 1) - chunk_begin(chunk);
    task.output_panels = output_panels(chunk);
    task.input_panels = input_panels(chunk);
    task.entry_begin = g.nnz * thread / threads;
    task.entry_end = g.nnz * (thread + 1) / threads;
    task.first_chunk = chunk == 0;
    task.last_chunk = chunk == chunks - 1;
    task.sums = keeps_sums ? sums : nullptr;
    task.scratch = keeps_sums ? nullptr : sums + thread * block_bytes;
    table.sparse_support(problem, task);
  };

  // A step packs one chunk and multiplies the one before it: every step is a barrier, and this halves their number.
  for (int64_t step = 0; step <= chunks; ++step) {
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) {
        if (step > 0) multiply(step - 1, thread);
        if (step < chunks) pack(step, thread);
      }
    });
  }
}

}  // namespace block_sparse::cpu
