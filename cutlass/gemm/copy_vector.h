// Global to shared memory, 16 bytes at a time.
#pragma once

#include <cute/tensor.hpp>

namespace block_sparse {

// The first `valid` elements of a 16-byte vector, asynchronously; the others become zero. `valid` == 0 reads nothing.
template <class Element>
CUTE_DEVICE void copy_vector_async(Element* shared, const Element* global, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(cute::cast_smem_ptr_to_uint(shared)),
               "l"(global), "r"(valid * int(sizeof(Element))));
}

// The same by element loads, for a source that is not 16-byte aligned.
template <class Element>
CUTE_DEVICE void copy_elements(Element* shared, const Element* global, int valid) {
  CUTE_NO_UNROLL
  for (int i = 0; i < 16 / int(sizeof(Element)); ++i) shared[i] = i < valid ? global[i] : Element(0);
}

// element[index] without an indexed access: a register array must not move to local memory where the index varies.
template <int kSize>
CUTE_DEVICE int select_element(const int (&elements)[kSize], int index) {
  int selected = elements[0];
  CUTE_UNROLL
  for (int i = 1; i < kSize; ++i) selected = index == i ? elements[i] : selected;
  return selected;
}

// Runs `copy_pass(pass, copy)` for each pass of a loader with the copy that the source allows. Only the aligned loop is
// unrolled: the other one must not swell the main loop beyond the instruction cache.
template <int kPasses, class Element, class CopyPass>
CUTE_DEVICE void copy_passes(bool aligned, CopyPass copy_pass) {
  if (aligned) {
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) copy_pass(pass, copy_vector_async<Element>);
  } else {
    CUTE_NO_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) copy_pass(pass, copy_elements<Element>);
  }
}

// Elements of a vector at `begin` that lie before `end`.
template <int kVector>
CUTE_DEVICE int valid_elements(int begin, int end) {
  return max(0, min(end - begin, kVector));
}

}  // namespace block_sparse
