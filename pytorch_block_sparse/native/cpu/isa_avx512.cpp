// AVX-512. The target is set here and not on the command line, because the choice is made at run time. It is
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#include "make_table.h"

namespace block_sparse::cpu {

namespace {

struct Avx512 {
  static constexpr int kVectorBytes = 64;
  static constexpr bool kHasHalfConversion = true;
  static constexpr bool kHasBFloat16Conversion = false;
  static constexpr int kWideTokens = 12;
  static constexpr int kNarrowTokens = 24;
  static constexpr int kSupportRows = 8;

  // The unmasked intrinsics read an undefined vector, about which GCC 12 warns.
  static __m512 load_half(const void* p) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  static void store_half(void* p, __m512 v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace

const KernelTable& avx512_kernels(DType dtype) { return table<Avx512>(dtype); }

const VnniTable& avx512_vnni() { return kVnniTable<Avx512>; }

}  // namespace block_sparse::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
