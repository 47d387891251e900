// Fills the kernel table of an instruction set. Included by isa_*.cpp alone.
#pragma once

#include "dense_sparse_kernel.h"
#include "few_tokens_kernel.h"
#include "kernel_table.h"
#include "sparse_support_kernel.h"
#include "vnni.h"

namespace block_sparse::cpu {

template <class Isa, class Stored>
void convert_rows(const void* in, int64_t stride, int64_t rows, int64_t columns, void* out) {
  for (int64_t row = 0; row < rows; ++row) {
    copy_row<Isa>(static_cast<Accumulate<Stored>*>(out) + row * columns, static_cast<const Stored*>(in) + row * stride,
                  columns);
  }
}

template <class Isa, class Stored>
void finish_sums(Activation activation, const void* sums, int64_t ldc, const void* bias, void* out, int64_t ldo,
                 int64_t tokens, int64_t n) {
  finish<Isa>(activation, static_cast<const Accumulate<Stored>*>(sums), ldc, static_cast<const Result<Stored>*>(bias),
              static_cast<Result<Stored>*>(out), ldo, tokens, n);
}

template <class Isa, class Stored>
inline constexpr KernelTable kTable = {
    .accumulate_bytes = sizeof(Accumulate<Stored>),
    .lanes = kLanes<Isa, Accumulate<Stored>>,
    .panel = DenseSparseKernel<Isa, Stored>::kPanel,
    .row_panel = SparseSupportKernel<Isa, Stored>::kRowPanel,
    .token_tile = &DenseSparseKernel<Isa, Stored>::token_tile,
    .pack_blocks = &DenseSparseKernel<Isa, Stored>::pack_blocks,
    .dense_sparse = &DenseSparseKernel<Isa, Stored>::run,
    .few_tokens = &FewTokensKernel<Isa, Stored>::run,
    .convert_rows = &convert_rows<Isa, Stored>,
    .pack_outputs = &SparseSupportKernel<Isa, Stored>::pack_outputs,
    .pack_inputs = &SparseSupportKernel<Isa, Stored>::pack_inputs,
    .sparse_support = &SparseSupportKernel<Isa, Stored>::run,
    .finish = &finish_sums<Isa, Stored>,
    .finish_block = &SparseSupportKernel<Isa, Stored>::finish_block,
};

// Without the forward of few tokens, which reads bfloat16 one by one.
template <class Isa>
inline constexpr KernelTable kPairTable = [] {
  using Stored = BFloat16Pair;
  return KernelTable{
      .accumulate_bytes = sizeof(float),
      .lanes = kLanes<Isa, float>,
      .panel = DenseSparseKernel<Isa, Stored>::kPanel,
      .row_panel = SparseSupportKernel<Isa, Stored>::kRowPanel,
      .token_tile = &DenseSparseKernel<Isa, Stored>::token_tile,
      .pack_blocks = &DenseSparseKernel<Isa, Stored>::pack_blocks,
      .dense_sparse = &DenseSparseKernel<Isa, Stored>::run,
      .few_tokens = nullptr,
      .convert_rows = nullptr,
      .pack_outputs = &SparseSupportKernel<Isa, Stored>::pack_outputs,
      .pack_inputs = &SparseSupportKernel<Isa, Stored>::pack_inputs,
      .sparse_support = &SparseSupportKernel<Isa, Stored>::run,
      .finish = &finish_sums<Isa, Stored>,
      .finish_block = &SparseSupportKernel<Isa, Stored>::finish_block,
  };
}();

template <class Isa>
inline constexpr VnniTable kVnniTable = {&Vnni<Isa>::transpose_block, &Vnni<Isa>::interleave_rows,
                                         &Vnni<Isa>::transpose_columns};

template <class Isa>
const KernelTable& table(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return kTable<Isa, double>;
    case DType::kFloat32:
      return kTable<Isa, float>;
    case DType::kBFloat16:
      return kTable<Isa, BFloat16>;
    case DType::kFloat16:
      return kTable<Isa, Float16>;
  }
  __builtin_unreachable();
}

}  // namespace block_sparse::cpu
