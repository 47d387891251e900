// What happens to a finished output block: bias, activation, rounding to the stored type.
#pragma once

#include "../problem.h"
#include "activation.h"
#include "vector.h"

namespace block_sparse::cpu {

// out[t, n] = activation(c[t, n] + bias[n]). c: [tokens, ldc]; bias: [n] or null; out: [tokens, ldo], may be c itself.
template <class Isa, Activation kActivation, class Real, class Stored>
void finish_rows(const Real* c, int64_t ldc, const Stored* bias, Stored* out, int64_t ldo, int64_t tokens, int64_t n) {
  constexpr int64_t lanes = kLanes<Isa, Real>;
  for (int64_t j = 0; j < n; j += lanes) {
    const int64_t width = lesser(lanes, n - j);
    Vector<Isa, Real> shift{};
    if (bias) shift = load_partial<Isa, Real>(bias + j, width);
    for (int64_t t = 0; t < tokens; ++t) {
      // A partial vector of c is only ever read from scratch, which is padded to whole vectors.
      Vector<Isa, Real> v = load<Isa, Real>(c + t * ldc + j);
      if (bias) v += shift;
      v = activate<Isa, kActivation>(v);
      if (width == lanes) {
        store<Isa, Real>(out + t * ldo + j, v);
      } else {
        store_partial<Isa, Real>(out + t * ldo + j, v, width);
      }
    }
  }
}

template <class Isa, class Real, class Stored>
void finish(Activation activation, const Real* c, int64_t ldc, const Stored* bias, Stored* out, int64_t ldo,
            int64_t tokens, int64_t n) {
  switch (activation) {
    case Activation::kNone:
      return finish_rows<Isa, Activation::kNone>(c, ldc, bias, out, ldo, tokens, n);
    case Activation::kRelu:
      return finish_rows<Isa, Activation::kRelu>(c, ldc, bias, out, ldo, tokens, n);
    case Activation::kGelu:
      return finish_rows<Isa, Activation::kGelu>(c, ldc, bias, out, ldo, tokens, n);
    case Activation::kGeluTanh:
      return finish_rows<Isa, Activation::kGeluTanh>(c, ldc, bias, out, ldo, tokens, n);
    case Activation::kSilu:
      return finish_rows<Isa, Activation::kSilu>(c, ldc, bias, out, ldo, tokens, n);
  }
}

}  // namespace block_sparse::cpu
