// Activation functions on vectors. float has its own exponential and normal distribution, because an epilogue that
// called the C library for every element would take longer than the product; double calls it.
#pragma once

#include <cmath>

#include "../problem.h"
#include "vector.h"

namespace block_sparse::cpu {

template <class Isa>
Floats<Isa> spread(float value) {
  return Floats<Isa>{} + value;
}

// e^v to 2 ulp: 2^n times a polynomial in what is left, |r| <= ln(2) / 2. Infinite above the range; a NaN stays one.
template <class Isa>
[[gnu::always_inline]] inline Floats<Isa> exponential(Floats<Isa> v) {
  constexpr float kLowest = -87.3f, kHighest = 88.7f;
  const Floats<Isa> x = v < kLowest ? spread<Isa>(kLowest) : (v > kHighest ? spread<Isa>(kHighest) : v);
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  constexpr float kRounder = 12582912.0f;
  const Floats<Isa> shifted = x * 1.44269504f + kRounder;
  const Floats<Isa> n = shifted - kRounder;
  const Floats<Isa> r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats<Isa> p = r * (1.0f / 720) + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Floats<Isa> scale = (Floats<Isa>)(((Bits<Isa>)shifted + 127) << 23);
  return v > kHighest ? spread<Isa>(HUGE_VALF) : p * scale;
}

// x times the normal distribution function of x, without cancellation for negative x: 1/2 erfc(z) e^(z^2) is fitted by
// a polynomial in 1 / (1 + 0.4 z), z = |x| / sqrt(2), to a relative error of 6e-8.
template <class Isa>
[[gnu::always_inline]] inline Floats<Isa> gelu(Floats<Isa> x) {
  constexpr float kCoefficients[] = {0.0201338828f, -0.0677361935f, 0.036922399f, 0.0498632938f, 0.0357551724f,
                                     0.0984810889f, 0.100479402f,   0.113287844f, 0.112813152f};
  const Floats<Isa> magnitude = x < 0.0f ? -x : x;
  const Floats<Isa> t = 1.0f / (1.0f + magnitude * static_cast<float>(0.4 * M_SQRT1_2));
  Floats<Isa> tail = spread<Isa>(0.0f);
  for (const float coefficient : kCoefficients) tail = tail * t + coefficient;
  tail *= t * exponential<Isa>(magnitude * magnitude * -0.5f);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <class Isa>
[[gnu::always_inline]] inline Floats<Isa> sigmoid_times(Floats<Isa> x, Floats<Isa> argument) {
  return x / (1.0f + exponential<Isa>(-argument));
}

template <class Isa, Activation kActivation>
[[gnu::always_inline]] inline Floats<Isa> activate(Floats<Isa> x) {
  if constexpr (kActivation == Activation::kRelu) {
    return x <= 0.0f ? Floats<Isa>{} : x;  // a NaN fails the comparison and passes through
  } else if constexpr (kActivation == Activation::kGelu) {
    return gelu<Isa>(x);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    // 1/2 (1 + tanh(u)) is the sigmoid of 2 u.
    constexpr float kTwice = static_cast<float>(M_SQRT2 * M_2_SQRTPI);
    return sigmoid_times<Isa>(x, x * kTwice * (1.0f + 0.044715f * x * x));
  } else if constexpr (kActivation == Activation::kSilu) {
    return sigmoid_times<Isa>(x, x);
  } else {
    return x;
  }
}

template <class Isa, Activation kActivation>
double activate_scalar(double x) {
  switch (kActivation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x <= 0 ? 0 : x;
    case Activation::kGelu:
      return x * 0.5 * (1 + std::erf(x * M_SQRT1_2));
    case Activation::kGeluTanh:
      return x * 0.5 * (1 + std::tanh(M_SQRT2 * M_2_SQRTPI * 0.5 * (x + 0.044715 * x * x * x)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
  }
  return x;
}

template <class Isa, Activation kActivation>
[[gnu::always_inline]] inline Vector<Isa, double> activate(Vector<Isa, double> v) {
  for (int lane = 0; lane < kLanes<Isa, double>; ++lane) v[lane] = activate_scalar<Isa, kActivation>(v[lane]);
  return v;
}

}  // namespace block_sparse::cpu
