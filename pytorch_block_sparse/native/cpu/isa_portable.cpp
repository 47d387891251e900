// 16-byte vectors, which every compiler target has or emulates.
#include "make_table.h"

namespace block_sparse::cpu {

namespace {

struct Portable {
  static constexpr int kVectorBytes = 16;
  static constexpr bool kHasHalfConversion = false;
  static constexpr bool kHasBFloat16Conversion = false;
  static constexpr int kWideTokens = 5;
  static constexpr int kNarrowTokens = 8;
  static constexpr int kSupportRows = 4;
};

}  // namespace

const KernelTable& portable_kernels(DType dtype) { return table<Portable>(dtype); }

}  // namespace block_sparse::cpu
