// Whether a product runs as densify + cuBLAS: blocks scattered into a dense temporary before a dense product, or
// gathered from one after it. The choice compares predicted times (densify_rates.h). No torch header, no CUDA.
#pragma once

#include "densify_mode.h"
#include "product.h"

namespace block_sparse {

struct Gpu {
  int major;  // compute capability
  int minor;
  int multiprocessors;
  int64_t memory;  // bytes in all
};

struct PlanSeconds {
  double blocks;  // our kernel on the stored blocks
  double densify;
};

PlanSeconds predict_seconds(const Product& product, const Gpu& gpu);

// Bytes of the dense temporary.
int64_t densify_bytes(const Product& product);

// Whether densify runs: where it fits in a sixteenth of the GPU's memory and, unless `mode` decides, for more than 16
// tokens where it wins by 5 % and by what it costs the host.
bool chooses_densify(const Product& product, const Gpu& gpu, DensifyMode mode);

}  // namespace block_sparse
