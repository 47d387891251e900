// Which plan ran: of the last CUDA product of a thread, and every distinct choice with BLOCK_SPARSE_LOG=plan in the
// environment. No torch header.
#pragma once

#include "densify_plan.h"

namespace block_sparse {

enum class Plan {
  kNone,
  kSm90,     // Hopper's kernels
  kSm80,     // the portable kernels
  kDecode,   // the kernel for few tokens
  kDensify,  // cuBLAS on a dense temporary
};

// "sm90", "sm80", "decode" or "densify".
const char* plan_name(Plan plan);

// Of the last product of this thread; kNone before any.
Plan last_plan();

// Remembers `plan`; prints it to stderr, once for each distinct text, if BLOCK_SPARSE_LOG is plan.
void record_plan(const Product& product, const Gpu& gpu, Plan plan);

}  // namespace block_sparse
