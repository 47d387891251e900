// The CPU back end: what the binding calls.
#pragma once

#include <string>

#include "../problem.h"

namespace block_sparse::cpu {

// Forward or input gradient over the stored blocks, parallel over (token tile, block row or column).
void dense_sparse(const DenseSparseProblem& problem);

// Weight gradient on the sparse support, parallel over stored blocks.
void sparse_support(const SparseSupportProblem& problem);

// Instruction sets compiled in and picked at run time: "avx512_bf16", "avx512", "avx2" or "portable".
// The environment variable BLOCK_SPARSE_CPU_CAPABILITY lowers the choice (read once).
std::string capability();

// How bfloat16 is multiplied: "brgemm" (oneDNN's, on the matrix units of AMX), "pairs" (AVX512_BF16), or "float32", to
// which it is converted.
std::string bfloat16_arithmetic();

// Threads that a parallel region of this library really runs on.
int measured_threads();

}  // namespace block_sparse::cpu
