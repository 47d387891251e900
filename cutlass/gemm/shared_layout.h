// Swizzled shared-memory layouts of an operand tile, and the instruction that reads fragments from each.
#pragma once

#include <cute/tensor.hpp>

namespace block_sparse {

// Which mode of an operand tile (MN, K) is contiguous, in global and in shared memory alike.
enum class Major { kK, kMN };

namespace detail {

// The atom spans 8 rows of the contiguous mode, at most 128 bytes each. The swizzle spreads the 16-byte vectors that
// one ldmatrix phase reads (8 rows, one vector each) over all 32 banks.
template <class Operand, Major kMajor, int kContiguous>
struct LayoutAtom {
  static_assert(sizeof(Operand) == 2 || sizeof(Operand) == 4);
  static constexpr int kRow = kContiguous * sizeof(Operand) >= 128 ? 128 / sizeof(Operand) : kContiguous;  // elements
  static constexpr int kRowVectors = kRow * sizeof(Operand) / 16;
  static constexpr int kVectorBits = sizeof(Operand) == 2 ? 3 : 2;  // elements of a vector, log2
  static constexpr int kSwizzleBits = kRowVectors >= 8 ? 3 : kRowVectors >= 4 ? 2 : 1;
  using Rows = cute::conditional_t<
      kMajor == Major::kK,
      cute::Layout<cute::Shape<cute::_8, cute::Int<kRow>>, cute::Stride<cute::Int<kRow>, cute::_1>>,
      cute::Layout<cute::Shape<cute::Int<kRow>, cute::_8>, cute::Stride<cute::_1, cute::Int<kRow>>>>;
  // 4-byte MN-major fragments have no ldmatrix: a warp reads 8 words of each of 4 rows, so rows move by 8 words.
  static constexpr bool kWords = sizeof(Operand) == 4 && kMajor == Major::kMN;
  using Swizzle = cute::conditional_t<kWords, cute::Swizzle<(kRow >= 32 ? 2 : 1), 3, 2>,
                                      cute::Swizzle<kSwizzleBits, kVectorBits, 3>>;
  using type = decltype(cute::composition(Swizzle{}, Rows{}));
};

}  // namespace detail

// (MN, K, STAGES)
template <class Operand, Major kMajor, int kMN, int kK, int kStages>
using SharedLayout = decltype(cute::tile_to_shape(typename detail::LayoutAtom < Operand, kMajor,
                                                  kMajor == Major::kK ? kK : kMN > ::type{},
                                                  cute::Shape<cute::Int<kMN>, cute::Int<kK>, cute::Int<kStages>>{}));

// Shared memory to registers: ldmatrix where it exists.
template <class Operand, Major kMajor>
using FragmentCopyAtom =
    cute::Copy_Atom<cute::conditional_t<kMajor == Major::kK, cute::SM75_U32x4_LDSM_N,
                                        cute::conditional_t<sizeof(Operand) == 2, cute::SM75_U16x8_LDSM_T,
                                                            cute::UniversalCopy<uint32_t>>>,
                    Operand>;

}  // namespace block_sparse
