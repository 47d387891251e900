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

}  // namespace block_sparse::cpu
