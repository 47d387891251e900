// AVX-512 with its bfloat16 dot product, for bfloat16 alone. The target is set here and not on the command line,
// because the choice is made at run time. It is never reset: templates are instantiated at the end of the file.
// Standard headers come first, so that they are not compiled for it.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#include "make_table.h"

namespace block_sparse::cpu {

namespace {

struct Avx512BFloat16 {
  static constexpr int kVectorBytes = 64;
  static constexpr bool kHasHalfConversion = false;
  static constexpr bool kHasBFloat16Conversion = true;
  static constexpr int kWideTokens = 12;
  static constexpr int kNarrowTokens = 24;
  static constexpr int kSupportRows = 8;

  // Rounds to nearest even; subnormal results become zero.
  static void store_bfloat16(void* p, Floats<Avx512BFloat16> v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
  }

  // sum + a b for the pair whose bits `a` has and each pair of `b`. Subnormal operands count as zero.
  [[gnu::always_inline]] static Floats<Avx512BFloat16> add_pair_product(Floats<Avx512BFloat16> sum, float a,
                                                                        Floats<Avx512BFloat16> b) {
    const __m512 pairs = _mm512_set1_ps(a);
    return (Floats<Avx512BFloat16>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)b, (__m512bh)pairs);
  }
};

}  // namespace

const KernelTable& avx512_bf16_kernels() { return kPairTable<Avx512BFloat16>; }

}  // namespace block_sparse::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
