// The instruction set in use.
#pragma once

#include "kernel_table.h"

namespace block_sparse::cpu {

// The kernels of the widest instruction set that this machine and BLOCK_SPARSE_CPU_CAPABILITY allow.
const KernelTable& kernels(DType dtype);

}  // namespace block_sparse::cpu
