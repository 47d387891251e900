#include "brgemm.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cstring>

#include "capability.h"
#include "cpu_kernels.h"
#include "workspace.h"

namespace block_sparse::cpu {

#if defined(CPUBLAS_BRGEMM_BF16BF16F32) && defined(__x86_64__)

namespace {

// A vector of floats, and the sides that blocks must be multiples of.
constexpr int64_t kVector = 16;
// Below this the blocks are read only a few times and memory decides.
constexpr int64_t kFewestTokens = 32;
// Tokens multiplied at a time.
constexpr int64_t kTokens = 128;
// The sum of one call: long enough that loading and storing the result does not matter, and of few distinct lengths,
// because oneDNN compiles a kernel for each.
constexpr int64_t kSegment = 256;
// Tokens of a weight gradient packed at a time.
constexpr int64_t kChunkTokens = 1024;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void multiply(int64_t m, int64_t n, int64_t k, const BFloat16* a, int64_t lda, const BFloat16* b, float* c, bool add) {
  at::native::cpublas::brgemm(m, n, k, lda, n, n, add, reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(b), c, true);
}

// Runs tasks on all threads; each gives the matrix units back when it is done.
template <class Task>
void for_each(int64_t tasks, const Task& task) {
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) task(i);
    at::native::cpublas::brgemm_release();
  });
}

bool whole_vectors(const Geometry& g) { return g.block_height % kVector == 0 && g.block_width % kVector == 0; }

}  // namespace

bool has_brgemm() {
  static const bool has = capability().starts_with("avx512") && at::native::cpublas::could_pack(at::kBFloat16);
  return has;
}

bool brgemm_takes(const DenseSparseProblem& problem) {
  return problem.dtype == DType::kBFloat16 && has_brgemm() && problem.tokens >= kFewestTokens &&
         whole_vectors(problem.geometry) && block_lines(problem).k_total % 2 == 0;
}

bool brgemm_takes(const SparseSupportProblem& problem) {
  return problem.dtype == DType::kBFloat16 && has_brgemm() && problem.tokens >= kFewestTokens &&
         whole_vectors(problem.geometry);
}

void brgemm_dense_sparse(const DenseSparseProblem& problem) {
  const BlockLines lines = block_lines(problem);
  const VnniTable& vnni = avx512_vnni();
  const KernelTable& table = kernels(problem.dtype);
  const int64_t nnz = problem.geometry.nnz, block = lines.n * lines.k;
  const int64_t blocks_in_segment = std::max<int64_t>(1, kSegment / lines.k);
  const int64_t lda = blocks_in_segment * lines.k;

  const int64_t threads = at::get_num_threads();
  const int64_t wanted = divide_up(problem.tokens, kTokens);
  const int64_t chunks = std::min(divide_up(wanted, threads) * threads, divide_up(problem.tokens, kFewestTokens));
  const int64_t chunk_tokens = divide_up(divide_up(problem.tokens, chunks), 16) * 16;
  const int64_t shares = std::min(lines.lines, divide_up(threads, divide_up(problem.tokens, chunk_tokens)));
  const int64_t tasks = divide_up(problem.tokens, chunk_tokens) * shares;

  const int64_t packed_bytes = Workspace::padded(nnz * block * sizeof(BFloat16));
  const int64_t gathered_bytes = Workspace::padded(chunk_tokens * lda * sizeof(BFloat16));
  const int64_t scratch_bytes = gathered_bytes + Workspace::padded(chunk_tokens * lines.n * sizeof(float));
  const Workspace workspace(packed_bytes + threads * scratch_bytes);
  BFloat16* packed = reinterpret_cast<BFloat16*>(workspace.at(0));  // [nnz, k / 2, n, 2]

  at::parallel_for(0, nnz, 1, [&](int64_t begin, int64_t end) {
    for (int64_t entry = begin; entry < end; ++entry) {
      const BFloat16* values = static_cast<const BFloat16*>(problem.values) + lines.slots[entry] * block;
      if (problem.direction == Direction::kForward) {
        vnni.transpose_block(values, lines.n, lines.k, packed + entry * block);
      } else {
        vnni.interleave_rows(values, lines.n, lines.k, lines.n, lines.k, lines.n, packed + entry * block);
      }
    }
  });

  for_each(tasks, [&](int64_t task) {
    const int64_t token = task / shares * chunk_tokens, share = task % shares;
    const int64_t tokens = std::min(chunk_tokens, problem.tokens - token);
    std::byte* scratch = workspace.at(packed_bytes + at::get_thread_num() * scratch_bytes);
    BFloat16* gathered = reinterpret_cast<BFloat16*>(scratch);         // [tokens, lda]
    float* sums = reinterpret_cast<float*>(scratch + gathered_bytes);  // [tokens, n]
    const BFloat16* input = static_cast<const BFloat16*>(problem.input) + token * problem.input_stride;
    const int64_t line_end = share_begin(lines, 1, 0, lines.lines, share + 1, shares).line;

    for (int64_t line = share_begin(lines, 1, 0, lines.lines, share, shares).line; line < line_end; ++line) {
      const int64_t last = lines.offsets[line + 1];
      if (lines.offsets[line] == last) std::memset(sums, 0, tokens * lines.n * sizeof(float));
      for (int64_t entry = lines.offsets[line]; entry < last; entry += blocks_in_segment) {
        const int64_t count = std::min(blocks_in_segment, last - entry);
        int64_t k = 0;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t k_offset = lines.partners[entry + i] * lines.k;
          const int64_t valid = std::min(lines.k, lines.k_total - k_offset);
          for (int64_t t = 0; t < tokens; ++t) {
            std::memcpy(gathered + t * lda + k, input + t * problem.input_stride + k_offset, valid * sizeof(BFloat16));
          }
          k += valid;
        }
        multiply(tokens, lines.n, k, gathered, lda, packed + entry * block, sums, entry > lines.offsets[line]);
      }
      const int64_t n_begin = line * lines.n;
      const BFloat16* bias = static_cast<const BFloat16*>(problem.bias);
      table.finish(problem.activation, sums, lines.n, bias ? bias + n_begin : nullptr,
                   static_cast<BFloat16*>(problem.output) + token * lines.n_total + n_begin, lines.n_total, tokens,
                   std::min(lines.n, lines.n_total - n_begin));
    }
  });
}

void brgemm_sparse_support(const SparseSupportProblem& problem) {
  const Geometry& g = problem.geometry;
  const VnniTable& vnni = avx512_vnni();
  const KernelTable& table = kernels(problem.dtype);
  const int64_t chunks = divide_up(problem.tokens, kChunkTokens);
  const int64_t chunk_tokens = divide_up(divide_up(problem.tokens, chunks), 2 * kVector) * 2 * kVector;
  const int64_t threads = std::min<int64_t>(g.nnz, at::get_num_threads());
  const int64_t block = g.block_height * g.block_width;

  const int64_t output_bytes = Workspace::padded(g.grid_rows() * g.block_height * chunk_tokens * sizeof(BFloat16));
  const int64_t input_bytes = Workspace::padded(g.grid_cols() * g.block_width * chunk_tokens * sizeof(BFloat16));
  const int64_t sums_blocks = chunks > 1 ? g.nnz : threads;
  const Workspace workspace(output_bytes + input_bytes + sums_blocks * block * sizeof(float));
  BFloat16* outputs = reinterpret_cast<BFloat16*>(workspace.at(0));            // dy [R, bh, tokens]
  BFloat16* inputs = reinterpret_cast<BFloat16*>(workspace.at(output_bytes));  // x  [C, tokens / 2, bw, 2]
  float* sums = reinterpret_cast<float*>(workspace.at(output_bytes + input_bytes));

  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t token = chunk * chunk_tokens;
    const int64_t tokens = std::min(chunk_tokens, problem.tokens - token);
    if (tokens <= 0) break;
    const bool last_chunk = token + tokens == problem.tokens;
    const BFloat16* dy = static_cast<const BFloat16*>(problem.output_gradient) + token * problem.output_gradient_stride;
    const BFloat16* x = static_cast<const BFloat16*>(problem.input) + token * problem.input_stride;
    at::parallel_for(0, g.grid_rows() + g.grid_cols(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i < g.grid_rows()) {
          const int64_t first = i * g.block_height;
          vnni.transpose_columns(dy + first, problem.output_gradient_stride, tokens, g.out_features - first,
                                 chunk_tokens, g.block_height, outputs + first * chunk_tokens, chunk_tokens);
        } else {
          const int64_t first = (i - g.grid_rows()) * g.block_width;
          vnni.interleave_rows(x + first, problem.input_stride, tokens, g.in_features - first, chunk_tokens,
                               g.block_width, inputs + first * chunk_tokens);
        }
      }
    });
    for_each(threads, [&](int64_t thread) {
      for (int64_t entry = g.nnz * thread / threads; entry < g.nnz * (thread + 1) / threads; ++entry) {
        const int64_t slot = problem.index.row_slots[entry];
        const int64_t row = problem.index.block_coords[2 * slot], column = problem.index.block_coords[2 * slot + 1];
        float* c = sums + (chunks > 1 ? slot : thread) * block;
        multiply(g.block_height, g.block_width, chunk_tokens, outputs + row * g.block_height * chunk_tokens,
                 chunk_tokens, inputs + column * g.block_width * chunk_tokens, c, chunk > 0);
        if (last_chunk) table.finish_block(problem, slot, c, g.block_width);
      }
    });
  }
}

#else

bool has_brgemm() { return false; }
bool brgemm_takes(const DenseSparseProblem&) { return false; }
bool brgemm_takes(const SparseSupportProblem&) { return false; }
void brgemm_dense_sparse(const DenseSparseProblem&) {}
void brgemm_sparse_support(const SparseSupportProblem&) {}

#endif

}  // namespace block_sparse::cpu
