// The instruction set in use.
#pragma once

#include "kernel_table.h"

namespace block_sparse::cpu {

// The kernels of the widest instruction set that this machine and BLOCK_SPARSE_CPU_CAPABILITY allow.
const KernelTable& kernels(DType dtype);

// The kernels for bfloat16 in pairs along the sum, or null without such an instruction.
const KernelTable* pair_kernels();

}  // namespace block_sparse::cpu
