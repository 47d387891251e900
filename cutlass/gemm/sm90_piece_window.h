// A half's list of pieces, as a loading warp walks it.
#pragma once

#include "gemm/sm90_loader.h"

namespace block_sparse::sm90 {

// 32 pieces, one a lane, and the next 32.
class PieceWindow {
 public:
  template <class Shared>
  CUTE_DEVICE void take(Shared& shared, const int32_t* pieces, int half, int lane) {
    pieces_ = pieces + load_shared(shared.box.pieces.first_piece[half]) + lane;
    current_ = load_shared(shared.box.pieces.head[half][lane]);
  }

  CUTE_DEVICE void begin() {
    passed_ = 0;
    next_ = *(pieces_ += 32);
  }

  // Where the piece of this lane's place begins, if the item's `mask` has one there. `before`: the places before it.
  CUTE_DEVICE int offset(uint32_t mask, uint32_t before) const {
    const int mine = passed_ + __popc(mask & before);
    int offset = __shfl_sync(~0u, current_, mine & 31);
    if (ends(mask)) {  // only then, because it waits for the next window
      const int beyond = __shfl_sync(~0u, next_, mine & 31);
      if (mine >= 32) offset = beyond;
    }
    return offset;
  }

  CUTE_DEVICE void pass(uint32_t mask) {
    const bool move = ends(mask);
    passed_ += __popc(mask);
    if (!move) return;
    passed_ -= 32;
    current_ = next_;
    next_ = *(pieces_ += 32);
  }

 private:
  CUTE_DEVICE bool ends(uint32_t mask) const { return passed_ + __popc(mask) >= 32; }

  const int32_t* pieces_;
  int current_;
  int next_;
  int passed_;  // pieces of the window that are loaded
};

}  // namespace block_sparse::sm90
