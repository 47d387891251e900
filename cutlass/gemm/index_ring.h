// The stored blocks that a group of lines needs, in order of their position along the inner dimension.
//
// A line is a block row (forward) or a block column (input gradient); a record is one inner position at which at least
// one line of the group has a block. Lines that share positions then share the loads of the dense operand. Records are
// made while the kernel runs, a window of positions at a time, from the sorted index: no work list, no host work.
#pragma once

#include <cute/tensor.hpp>

namespace block_sparse {

struct LineIndex {
  const int32_t* offsets;    // [lines + 1]
  const int32_t* positions;  // [nnz] ascending within a line
  const int32_t* slots;      // [nnz]
};

template <int kLines>
struct IndexRing {
  static constexpr int kCapacity = 64;  // a power of two
  static constexpr int kWindow = 32;    // positions looked at together, and the most records made at once

  int32_t inner[kCapacity];          // first index along the inner dimension
  uint32_t present[kCapacity];       // bit j: line j has a block here
  int64_t block[kCapacity][kLines];  // element offset of line j's piece in `values`, where present
  // Records made so far, by parity of the main loop's iteration: one warp writes the next count while all read this
  // one.
  int32_t produced[2];

  CUTE_DEVICE static int index_of(int record) { return record & (kCapacity - 1); }
};

// Lives in the registers of one warp; lane j < kLines follows line j.
template <int kLines>
struct IndexProducer {
  static constexpr int kWindow = IndexRing<kLines>::kWindow;
  LineIndex index;
  int64_t block_elements;
  int32_t block_inner;         // side of a block along the inner dimension
  const int32_t* line_offset;  // [kLines] element offset of a line's piece inside its blocks
  int32_t cursor;              // next entry of this lane's line
  int32_t end;
  int32_t produced = 0;
  bool finished = false;

  // Makes records until there are `wanted` of them or the lines are exhausted.
  CUTE_DEVICE void produce(IndexRing<kLines>& ring, int32_t wanted, int lane) {
    while (!finished && produced < wanted) {
      if constexpr (kLines == 1) {
        copy_entries(ring, lane);
      } else {
        merge_window(ring, lane);
      }
    }
  }

 private:
  CUTE_DEVICE void copy_entries(IndexRing<kLines>& ring, int lane) {
    int first = __shfl_sync(~0u, cursor, 0);
    int last = __shfl_sync(~0u, end, 0);
    int count = min(kWindow, last - first);
    if (lane < count) {
      int at = ring.index_of(produced + lane);
      ring.inner[at] = index.positions[first + lane] * block_inner;
      ring.present[at] = 1;
      ring.block[at][0] = index.slots[first + lane] * block_elements + line_offset[0];
    }
    produced += count;
    cursor = first + count;
    finished = cursor == last;
  }

  CUTE_DEVICE void merge_window(IndexRing<kLines>& ring, int lane) {
    int next = cursor < end ? index.positions[cursor] : INT_MAX;
    int window = __reduce_min_sync(~0u, next);
    if (window == INT_MAX) {
      finished = true;
      return;
    }
    uint32_t in_line[kLines];  // bit i: the line has a block at window + i
    int first[kLines];
    uint32_t in_any = 0;
    CUTE_UNROLL
    for (int j = 0; j < kLines; ++j) {
      first[j] = __shfl_sync(~0u, cursor, j);
      int entry = first[j] + lane;
      int position = entry < __shfl_sync(~0u, end, j) ? index.positions[entry] : INT_MAX;
      uint32_t distance = uint32_t(position) - uint32_t(window);
      in_line[j] = __reduce_or_sync(~0u, distance < kWindow ? 1u << distance : 0u);
      in_any |= in_line[j];
      if (lane == j) cursor += __popc(in_line[j]);
    }
    uint32_t before = (1u << lane) - 1;
    if (in_any >> lane & 1) {
      int at = ring.index_of(produced + __popc(in_any & before));
      uint32_t present = 0;
      CUTE_UNROLL
      for (int j = 0; j < kLines; ++j) {
        if (in_line[j] >> lane & 1) {
          present |= 1u << j;
          ring.block[at][j] = index.slots[first[j] + __popc(in_line[j] & before)] * block_elements + line_offset[j];
        }
      }
      ring.inner[at] = (window + lane) * block_inner;
      ring.present[at] = present;
    }
    produced += __popc(in_any);
  }
};

}  // namespace block_sparse
