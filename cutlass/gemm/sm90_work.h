// Work lists of the Hopper dense x sparse kernel: what the host builds once a pattern and the kernel walks. Plain
// structs, the same for host and device; no CUDA header.
//
// Lines are strips of 64 outputs (features of y forward, of x for the input gradient); two of them make a group, which
// one thread block multiplies with 256 tokens. Chunks are strips of 64 inputs. A piece is the 64 x 64 part of a stored
// block where a line meets a chunk.
#pragma once

#include <cstdint>

namespace block_sparse::sm90 {

constexpr int kPieceSide = 64;
constexpr int kGroupLines = 2;

// One chunk that at least one line of the group needs, and the piece of each line there, or -1. Pieces are numbered
// through `values` seen as [nnz * bh / 64, bw / 64] squares, row-major.
struct Item {
  int32_t chunk;
  int32_t pieces[kGroupLines];
  int32_t unused;
};

struct Group {
  int32_t first_item;
  int32_t items;
  int32_t first_feature[kGroupLines];  // of each line; past the last feature where the group has no second line
};

struct WorkHeader {
  int32_t groups;
  int32_t unused[3];
};

// The list in memory: header, groups in raster order, the same groups longest first, items.
struct WorkLists {
  const Group* groups;  // [2 * count]
  const Item* items;
};

constexpr int64_t work_bytes(int64_t groups, int64_t items) {
  return sizeof(WorkHeader) + 2 * groups * sizeof(Group) + items * sizeof(Item);
}

#ifdef __CUDACC__
__host__ __device__
#endif
    inline WorkLists locate_work(const int32_t* list, int64_t groups) {
  const Group* first = reinterpret_cast<const Group*>(list + sizeof(WorkHeader) / sizeof(int32_t));
  return {first, reinterpret_cast<const Item*>(first + 2 * groups)};
}

}  // namespace block_sparse::sm90
