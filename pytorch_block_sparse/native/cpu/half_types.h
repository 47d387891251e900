// The 16-bit storage types as bit patterns; vector.h converts them.
#pragma once

#include <cstdint>

namespace block_sparse::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// Two neighbours along the sum, the operand of instructions that add two products at once. Kernels for it see a problem
// whose sum is half as long: its strides and extents along the sum count pairs.
struct BFloat16Pair {
  BFloat16 values[2];
};

}  // namespace block_sparse::cpu
