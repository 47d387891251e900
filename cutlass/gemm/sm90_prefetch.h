// What a kernel of some tens of microseconds would begin by waiting for, one dependent load after the other: asked for
// at once.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/config.hpp>

namespace block_sparse {

// Brings the beginning of a work list to L2, as much as the grid has first warps; whole thread blocks call.
CUTE_DEVICE void prefetch_work(const int32_t* work, int64_t words) {
  constexpr int kLineWords = 32;
  const int64_t word = (int64_t(blockIdx.x) * 32 + threadIdx.x) * kLineWords;
  if (threadIdx.x < 32 && word < words) asm volatile("prefetch.global.L2 [%0];" ::"l"(work + word));
}

CUTE_DEVICE void prefetch_map(const CUtensorMap& map) {
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&map));
}

}  // namespace block_sparse
