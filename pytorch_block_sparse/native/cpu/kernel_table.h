// What one instruction set offers for one dtype. The drivers choose and divide the work, these functions do it.
#pragma once

#include <cstdint>

#include "../problem.h"
#include "block_lines.h"
#include "half_types.h"

namespace block_sparse::cpu {

// A share of a forward or an input gradient: some tokens by some units.
struct DenseSparseTask {
  int64_t token_begin;
  int64_t token_end;
  Unit begin;
  Unit end;
  const void* packed;    // blocks from pack_blocks, or null: they are read where they are
  int64_t packed_first;  // the entry that `packed` begins with
  void* scratch;         // panels of the input [tokens, K], one vector of slack, sums [tokens, n]
};

// A share of a weight gradient over one chunk of the tokens. Block heights are padded to row panels,
// widths to whole vectors.
struct SparseSupportTask {
  int64_t tokens;             // in the chunk
  const void* output_panels;  // dy [R, bh / row_panel, tokens, row_panel]
  const void* input_panels;   // x  [C, bw / panel, tokens, panel]
  int64_t entry_begin;        // in row order
  int64_t entry_end;
  bool first_chunk;
  bool last_chunk;
  void* sums;     // [nnz, bh, bw]: where sums wait between chunks if they cannot do so in the result, or null
  void* scratch;  // [bh, bw]
};

struct KernelTable {
  int64_t accumulate_bytes;  // size of the accumulation type
  int64_t lanes;             // of the accumulation type in a vector
  int64_t panel;             // columns of the widest tile
  int64_t row_panel;         // rows of the weight gradient that are packed side by side

  // Tokens in a tile for blocks of n outputs.
  int64_t (*token_tile)(int64_t n);

  // Blocks of entries [begin, end) as k-major panels, n padded to whole vectors.
  void (*pack_blocks)(const DenseSparseProblem&, const BlockLines&, int64_t begin, int64_t end, void* packed);

  void (*dense_sparse)(const DenseSparseProblem&, const BlockLines&, const DenseSparseTask&);

  // The forward of few tokens, straight from the row-major blocks. x: [T, I] in the accumulation type.
  void (*few_tokens)(const DenseSparseProblem&, const BlockLines&, const DenseSparseTask&, const void* x,
                     int64_t stride);

  // Rows of x in the accumulation type. in: [rows, stride]; out: [rows, columns].
  void (*convert_rows)(const void* in, int64_t stride, int64_t rows, int64_t columns, void* out);

  // Rows [begin, end) of dy or x as the panels of a SparseSupportTask, for blocks of `side` columns. in: [rows,
  // stride].
  void (*pack_outputs)(const void* in, int64_t stride, int64_t begin, int64_t end, int64_t rows, int64_t columns,
                       int64_t side, void* panels);
  void (*pack_inputs)(const void* in, int64_t stride, int64_t begin, int64_t end, int64_t rows, int64_t columns,
                      int64_t side, void* panels);

  void (*sparse_support)(const SparseSupportProblem&, const SparseSupportTask&);

  // Results of sums that were made elsewhere. sums: [tokens, ldc]; out: [tokens, ldo].
  void (*finish)(Activation activation, const void* sums, int64_t ldc, const void* bias, void* out, int64_t ldo,
                 int64_t tokens, int64_t n);
  // sums: [bh, ldc].
  void (*finish_block)(const SparseSupportProblem&, int64_t slot, const void* sums, int64_t ldc);
};

// Packing for the matrix units, see vnni.h.
struct VnniTable {
  void (*transpose_block)(const BFloat16* in, int64_t n, int64_t k, BFloat16* out);
  void (*interleave_rows)(const BFloat16* in, int64_t ldi, int64_t rows, int64_t columns, int64_t k, int64_t n,
                          BFloat16* out);
  void (*transpose_columns)(const BFloat16* in, int64_t ldi, int64_t rows, int64_t columns, int64_t k, int64_t n,
                            BFloat16* out, int64_t ldo);
};

// Defined in one isa_*.cpp each.
const KernelTable& portable_kernels(DType dtype);
const KernelTable& avx2_kernels(DType dtype);
const KernelTable& avx512_kernels(DType dtype);
// For bfloat16 in pairs along the sum.
const KernelTable& avx512_bf16_kernels();
const VnniTable& avx512_vnni();

}  // namespace block_sparse::cpu
