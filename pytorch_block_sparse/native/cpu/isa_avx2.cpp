// AVX2, FMA and F16C. The target is set here and not on the command line, because the choice is made at run time. It is
// never reset: templates are instantiated at the end of the file. Standard headers come first, so that they are not
// compiled for it.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "make_table.h"

namespace block_sparse::cpu {

namespace {

struct Avx2 {
  static constexpr int kVectorBytes = 32;
  static constexpr bool kHasHalfConversion = true;
  static constexpr bool kHasBFloat16Conversion = false;
  static constexpr int kWideTokens = 6;
  static constexpr int kNarrowTokens = 12;
  static constexpr int kSupportRows = 4;

  static __m256 load_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
  static void store_half(void* p, __m256 v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace

const KernelTable& avx2_kernels(DType dtype) { return table<Avx2>(dtype); }

}  // namespace block_sparse::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
