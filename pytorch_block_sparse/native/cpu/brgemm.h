// bfloat16 on the matrix units (AMX), through the brgemm of oneDNN that ATen exports.
#pragma once

#include "../problem.h"

namespace block_sparse::cpu {

// True if this ATen, this machine and BLOCK_SPARSE_CPU_CAPABILITY have it.
bool has_brgemm();

// Whether a problem suits it: whole vectors, pairs along the sum, and enough tokens to fill the units.
bool brgemm_takes(const DenseSparseProblem& problem);
bool brgemm_takes(const SparseSupportProblem& problem);

void brgemm_dense_sparse(const DenseSparseProblem& problem);
void brgemm_sparse_support(const SparseSupportProblem& problem);

}  // namespace block_sparse::cpu
