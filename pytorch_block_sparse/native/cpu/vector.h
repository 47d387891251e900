// Vectors of one instruction set: types, loads and stores with conversion, transposition.
//
// `Isa` is a tag type that each isa_*.cpp defines in its anonymous namespace. Every template on it therefore has
// internal linkage: code compiled for AVX2 or AVX-512 can never be merged with the portable copy by the linker.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "half_types.h"

namespace block_sparse::cpu {

template <class Stored>
using Accumulate = std::conditional_t<std::is_same_v<Stored, double>, double, float>;

// What a kernel for operands of a type writes.
template <class Stored>
using Result = std::conditional_t<std::is_same_v<Stored, BFloat16Pair>, BFloat16, Stored>;

// How it copies them: converted, or pairs as they are.
template <class Stored>
using Packed = std::conditional_t<std::is_same_v<Stored, BFloat16Pair>, BFloat16Pair, Accumulate<Stored>>;

static constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
static constexpr int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

template <class Isa, class T>
inline constexpr int kLanes = Isa::kVectorBytes / static_cast<int>(sizeof(T));

template <class T, int N>
struct VectorOf {
  typedef T Aligned __attribute__((vector_size(N * sizeof(T))));
  typedef T Unaligned __attribute__((vector_size(N * sizeof(T)), aligned(alignof(T)), may_alias));
};

template <class Isa, class Real>
using Vector = typename VectorOf<Real, kLanes<Isa, Real>>::Aligned;

template <class Isa>
using Floats = Vector<Isa, float>;

template <class Isa>
using Bits = Vector<Isa, uint32_t>;

// The 16-bit patterns that widen to one vector of floats.
template <class Isa>
using HalfBits = VectorOf<uint16_t, kLanes<Isa, float>>;

template <class Isa, class Real>
[[gnu::always_inline]] inline Vector<Isa, Real> load(const Real* p) {
  return *reinterpret_cast<const typename VectorOf<Real, kLanes<Isa, Real>>::Unaligned*>(p);
}

template <class Isa, class Real>
[[gnu::always_inline]] inline void store(Real* p, Vector<Isa, Real> v) {
  *reinterpret_cast<typename VectorOf<Real, kLanes<Isa, Real>>::Unaligned*>(p) = v;
}

template <class Isa>
[[gnu::always_inline]] inline Bits<Isa> load_half_bits(const void* p) {
  return __builtin_convertvector(*static_cast<const typename HalfBits<Isa>::Unaligned*>(p), Bits<Isa>);
}

template <class Isa>
[[gnu::always_inline]] inline void store_half_bits(void* p, Bits<Isa> v) {
  *static_cast<typename HalfBits<Isa>::Unaligned*>(p) = __builtin_convertvector(v, typename HalfBits<Isa>::Aligned);
}

template <class Isa, class Real>
[[gnu::always_inline]] inline Vector<Isa, float> load(const BFloat16* p) {
  return (Floats<Isa>)(load_half_bits<Isa>(p) << 16);
}

// The bits of pairs: only moved, and handed to Isa::add_pair_product.
template <class Isa, class Real>
[[gnu::always_inline]] inline Vector<Isa, float> load(const BFloat16Pair* p) {
  return load<Isa, float>(reinterpret_cast<const float*>(p));
}

// Rounds to nearest even. The carry of the rounding would turn some NaNs into infinities, so NaNs are kept apart.
template <class Isa, class Real>
[[gnu::always_inline]] inline void store(BFloat16* p, Vector<Isa, float> v) {
  if constexpr (Isa::kHasBFloat16Conversion) return Isa::store_bfloat16(p, v);
  const Bits<Isa> bits = (Bits<Isa>)v;
  const Bits<Isa> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits<Isa> quiet = (bits >> 16) | 0x40;
  store_half_bits<Isa>(p, (bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

template <class Isa, class Real>
[[gnu::always_inline]] inline Vector<Isa, float> load(const Float16* p) {
  if constexpr (Isa::kHasHalfConversion) {
    return Isa::load_half(p);
  } else {
    const Bits<Isa> half = load_half_bits<Isa>(p);
    const Bits<Isa> magnitude = (half & 0x7fff) << 13;
    const Bits<Isa> normal = magnitude + (112u << 23);
    const Bits<Isa> non_finite = magnitude + (224u << 23);
    // A subnormal half is its bits times 2^-24. Adding and subtracting 2^-14 gives that without touching subnormal
    // floats, which the user may have set to flush to zero.
    const Bits<Isa> smallest_normal = Bits<Isa>{} + (113u << 23);
    const Bits<Isa> subnormal = (Bits<Isa>)((Floats<Isa>)(magnitude + (113u << 23)) - (Floats<Isa>)smallest_normal);
    const Bits<Isa> finite = magnitude < (0x400u << 13) ? subnormal : normal;
    return (Floats<Isa>)((magnitude < (0x7c00u << 13) ? finite : non_finite) | ((half & 0x8000) << 16));
  }
}

template <class Isa, class Real>
[[gnu::always_inline]] inline void store(Float16* p, Vector<Isa, float> v) {
  if constexpr (Isa::kHasHalfConversion) {
    Isa::store_half(p, v);
  } else {
    const Bits<Isa> sign = ((Bits<Isa>)v & 0x80000000u) >> 16;
    const Bits<Isa> magnitude = (Bits<Isa>)v & 0x7fffffff;
    const Bits<Isa> normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Below 2^-14 the addition of 0.5 aligns the bits to a subnormal half's and rounds them.
    const Bits<Isa> half_one = Bits<Isa>{} + 0x3f000000u;
    const Bits<Isa> subnormal = (Bits<Isa>)((Floats<Isa>)magnitude + (Floats<Isa>)half_one) - 0x3f000000u;
    const Bits<Isa> finite = magnitude < (113u << 23) ? subnormal : normal;
    const Bits<Isa> infinite_or_finite = magnitude >= 0x477ff000u ? Bits<Isa>{} + 0x7c00 : finite;
    store_half_bits<Isa>(p, sign | (magnitude > 0x7f800000u ? Bits<Isa>{} + 0x7e00 : infinite_or_finite));
  }
}

// The first `count` lanes; the others are zero and their memory is not touched.
template <class Isa, class Real, class Stored>
inline Vector<Isa, Real> load_partial(const Stored* p, int64_t count) {
  Stored lanes[kLanes<Isa, Real>] = {};
  std::memcpy(lanes, p, count * sizeof(Stored));
  return load<Isa, Real>(lanes);
}

template <class Isa, class Real, class Stored>
inline void store_partial(Stored* p, Vector<Isa, Real> v, int64_t count) {
  Stored lanes[kLanes<Isa, Real>];
  store<Isa, Real>(lanes, v);
  std::memcpy(p, lanes, count * sizeof(Stored));
}

// Copies `count` elements, converting.
template <class Isa, class To, class From>
inline void copy_row(To* to, const From* from, int64_t count) {
  using Real = Accumulate<From>;
  constexpr int64_t lanes = kLanes<Isa, Real>;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store<Isa, Real>(to + i, load<Isa, Real>(from + i));
  if (i < count) store_partial<Isa, Real>(to + i, load_partial<Isa, Real>(from + i, count - i), count - i);
}

// Adds `count` elements to those of `to`, in the accumulation type of `from`.
template <class Isa, class To, class From>
inline void add_row(To* to, const From* from, int64_t count) {
  using Real = Accumulate<From>;
  constexpr int64_t lanes = kLanes<Isa, Real>;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    store<Isa, Real>(to + i, load<Isa, Real>(to + i) + load<Isa, Real>(from + i));
  }
  if (i < count) {
    const auto sum = load_partial<Isa, Real>(to + i, count - i) + load_partial<Isa, Real>(from + i, count - i);
    store_partial<Isa, Real>(to + i, sum, count - i);
  }
}

// One butterfly stage of a transposition: exchanges elements (i, j + Distance) and (i + Distance, j).
template <int Distance, class V, int... Lane>
[[gnu::always_inline]] inline void exchange(V& low, V& high, std::integer_sequence<int, Lane...>) {
  constexpr int lanes = sizeof...(Lane);
  const V first = __builtin_shufflevector(low, high, ((Lane & Distance) ? Lane - Distance + lanes : Lane)...);
  high = __builtin_shufflevector(low, high, ((Lane & Distance) ? Lane + lanes : Lane + Distance)...);
  low = first;
}

// Transposes a square of as many vectors as each has lanes.
template <int Distance, int Lanes, class V>
[[gnu::always_inline]] inline void transpose(V (&rows)[Lanes]) {
  if constexpr (Distance > 0) {
#pragma GCC unroll 16
    for (int row = 0; row < Lanes; ++row) {
      if (!(row & Distance)) {
        exchange<Distance>(rows[row], rows[row + Distance], std::make_integer_sequence<int, Lanes>{});
      }
    }
    transpose<Distance / 2>(rows);
  }
}

}  // namespace block_sparse::cpu
