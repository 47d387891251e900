// Work lists of the Hopper dense x sparse kernel: what the host builds once a pattern and the kernel walks. Plain
// structs, the same for host and device; no CUDA header.
//
// Blocks are cut into square pieces of 64, 32 or 16 elements, numbered through `values` seen as [nnz * bh / side,
// bw / side] squares, row-major. Lines are strips of `side` outputs (features of y forward, of x for the input
// gradient). A group is what one thread block computes, 128 outputs in two halves, each as many lines as fill 64
// outputs, one matrix instruction's M; or what a cluster of two does, 256 outputs, the first two halves by the thread
// block of rank 0. An item is 64 inputs, in parts of `side`, at least one of which a line of the group needs; they come
// in one chunk or in two, from anywhere.
#pragma once

#include <cstdint>

namespace block_sparse::sm90 {

constexpr int kHalves = 2;
constexpr int kHalfOutputs = 64;
constexpr int kGroupOutputs = kHalves * kHalfOutputs;
constexpr int kItemInputs = 64;

// The parts of an item that each half multiplies, as the multiplying warps read it: a half's 16 bits are their count,
// and from bit 4 on, two bits each, the parts. Bit 30 + c: chunk c is needed. Bit 29: two chunks follow one another.
constexpr int kPartsHalfBits = 16;
constexpr uint32_t kHalfPartsMask = (1u << 12) - 1;
constexpr int kPartsChunkBit = 30;
constexpr uint32_t kPartsAdjacent = 1u << 29;

constexpr int part_count(uint32_t half_parts) { return int(half_parts & 7); }
constexpr int part_at(uint32_t half_parts, int i) { return int(half_parts >> (4 + 2 * i) & 3); }

// Pieces of 64: a half is one line, an item one part.
struct WideWork {
  static constexpr int kSide = 64;
  static constexpr int kCluster = 1;
  static constexpr int kHalfLines = 1;
  static constexpr int kBlockLines = kHalves * kHalfLines;
  static constexpr int kGroupLines = kBlockLines;
  static constexpr int kParts = 1;
  static constexpr int kChunks = 1;
  static constexpr int kChunkInputs = kItemInputs / kChunks;

  struct Item {
    int32_t chunk[kChunks];
    int32_t pieces[kGroupLines];  // of each line, or -1
    int32_t unused;

    constexpr uint32_t parts(int = 0) const {
      const bool first = pieces[0] >= 0, second = pieces[1] >= 0;
      return uint32_t(first) | uint32_t(second) << kPartsHalfBits | uint32_t(first || second) << kPartsChunkBit;
    }
  };

  struct Group {
    int32_t first_item;
    int32_t items;
    int32_t first_feature[kGroupLines];  // of each line; past the last feature where the group has no such line
  };

  const Group* groups;  // [2 * count]: in raster order, then again longest first
  const Item* items;

  // An empty group still sends one item, so that its tile is stored.
  static constexpr Item empty_item() { return {{0}, {-1, -1}, 0}; }
};

// Pieces of 32, whose two parts are chunks from anywhere, or of 16, whose four parts are one chunk: the copy engine
// takes as long for a row of 32 or 64 bytes as for one of 128. `kCluster`: thread blocks that compute a group.
template <int kSide_, int kCluster_ = 1>
struct NarrowWork {
  static constexpr int kSide = kSide_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kHalfLines = kHalfOutputs / kSide;
  static constexpr int kBlockLines = kHalves * kHalfLines;  // that a thread block computes
  static constexpr int kGroupHalves = kCluster * kHalves;
  static constexpr int kGroupLines = kCluster * kBlockLines;
  static constexpr int kParts = kItemInputs / kSide;
  static constexpr int kChunks = kSide == 32 ? 2 : 1;
  static constexpr int kChunkInputs = kItemInputs / kChunks;
  static constexpr int kChunkParts = kParts / kChunks;
  static constexpr int kHalfPieces = kParts * kHalfLines;  // of an item, at most
  static constexpr uint32_t kPartLines = (1u << kHalfLines) - 1;
  static constexpr int kMaskBits = 32 / kGroupHalves;
  static_assert(kHalfPieces <= kMaskBits);

  struct Item {
    int32_t chunk[kChunks];
    uint32_t mask;  // bit half * kMaskBits + part * kHalfLines + line: the half's line has a block at that part

    constexpr uint32_t half_mask(int half) const { return mask >> (half * kMaskBits) & ((1u << kMaskBits) - 1); }

    // What the halves of one thread block of the cluster multiply, and the chunks that any of the group's needs.
    constexpr uint32_t parts(int rank = 0) const {
      uint32_t parts = 0;
      for (int group_half = 0; group_half < kGroupHalves; ++group_half) {
        const int half = group_half - rank * kHalves;
        const bool ours = half >= 0 && half < kHalves;
        uint32_t listed = 0;
        for (int part = 0; part < kParts; ++part) {
          if (!(half_mask(group_half) >> (part * kHalfLines) & kPartLines)) continue;
          parts |= uint32_t(1) << (kPartsChunkBit + part / kChunkParts);
          if (ours) parts |= uint32_t(part) << (half * kPartsHalfBits + 4 + 2 * listed++);
        }
        if (ours) parts |= listed << (half * kPartsHalfBits);
      }
      if constexpr (kChunks == 2) {
        const bool both = parts >> kPartsChunkBit == 3;
        if (both && chunk[1] == chunk[0] + 1) parts |= kPartsAdjacent;
      }
      return parts;
    }
  };

  struct Group {
    int32_t first_item;
    int32_t items;
    int32_t first_piece[kGroupHalves];  // into pieces, where those of a half lie in the order of items and bits
    int32_t first_feature[kGroupLines];
  };

  const Group* groups;  // [2 * count]
  const Item* items;
  const int32_t* pieces;  // where each begins in `values`, in kSide elements; kPiecesPadding more can be read

  static constexpr int kPiecesPadding = 64;

  static constexpr Item empty_item() { return {}; }
};

}  // namespace block_sparse::sm90
