// Loads stored blocks of W into shared memory as the operand (N, K): N runs along the group's lines, K along one stage.
// What no block covers is left as it was; the mainloop skips it.
#pragma once

#include "gemm/copy_vector.h"
#include "gemm/index_ring.h"
#include "gemm/shared_layout.h"

namespace block_sparse {

// Blocks are cut along K into chunks; a stage takes a fixed number of them. A cursor walks over the chunks of all
// records.
struct ChunkCursor {
  int record;
  int part;  // chunk within the record's blocks

  CUTE_DEVICE void advance(int records, int parts, int chunks_per_block) {
    record += records;
    part += parts;
    if (part >= chunks_per_block) {
      part -= chunks_per_block;
      ++record;
    }
  }
};

// Layout: (N, K, STAGES). kUnit: side of the square pieces that blocks are cut into, along N; kChunk: along K.
template <class Element, Major kMajor, class Layout, int kN, int kUnit, int kK, int kChunk, int kThreads>
struct BlockLoader {
  static constexpr int kLines = kN / kUnit;
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr bool kInnerContiguous = kMajor == Major::kK;
  static constexpr int kVectorsPerRow = (kInnerContiguous ? kK : kN) / kVector;
  static constexpr int kRowsPerPass = kThreads / kVectorsPerRow;
  static constexpr int kRows = kInnerContiguous ? kN : kK;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(kRows % kRowsPerPass == 0);
  static_assert(kInnerContiguous || kRowsPerPass <= kChunk, "the chunk of a pass is a constant");
  static constexpr int kPhases = kRowsPerPass >= 8 ? 1 : 8 / kRowsPerPass;  // the swizzle repeats every 8 rows
  static constexpr int kPeriod = kPhases * kRowsPerPass;
  static constexpr int kPeriodStep = int(kInnerContiguous ? Layout{}(kPeriod, 0, 0) : Layout{}(0, kPeriod, 0));

  const Element* values;  // [nnz, bh, bw]
  int block_width;        // bw
  bool aligned;
  int row_in_tile;
  int vector_in_tile;  // element
  int shared_offset[kPhases];

  CUTE_DEVICE BlockLoader(const Element* values, int block_width, bool aligned, int thread)
      : values(values),
        block_width(block_width),
        aligned(aligned),
        row_in_tile(thread / kVectorsPerRow),
        vector_in_tile(thread % kVectorsPerRow * kVector) {
    CUTE_UNROLL
    for (int phase = 0; phase < kPhases; ++phase) {
      int row = row_in_tile + phase * kRowsPerPass;
      shared_offset[phase] = kInnerContiguous ? Layout{}(row, vector_in_tile, 0) : Layout{}(vector_in_tile, row, 0);
    }
  }

  // `cursor`: the stage's first chunk, or this thread's own where K is contiguous. `records`: how many exist.
  // extent_k: K indices that exist.
  CUTE_DEVICE void load(Element* stage, const IndexRing<kLines>& ring, ChunkCursor cursor, int records,
                        int chunks_per_block, int extent_k) const {
    if constexpr (kInnerContiguous) {  // a thread stays in one chunk and goes through the lines
      if (cursor.record >= records) return;
      const int at = ring.index_of(cursor.record);
      const int inner = cursor.part * kChunk + vector_in_tile % kChunk;
      const int valid = valid_elements<kVector>(ring.inner[at] + inner, extent_k);
      const uint32_t present = ring.present[at];
      const Element* column = values + inner;
      copy_passes<kPasses, Element>(aligned, [&](int pass, auto copy) {
        int n = row_in_tile + pass * kRowsPerPass;
        int line = kLines == 1 ? 0 : n / kUnit;
        if (kLines > 1 && !(present >> line & 1)) return;
        copy(stage + select_element(shared_offset, pass % kPhases) + pass / kPhases * kPeriodStep,
             column + ring.block[at][line] + n % kUnit * block_width, valid);
      });
    } else {  // a thread stays in one line and goes through the chunks
      const int line = kLines == 1 ? 0 : vector_in_tile / kUnit;
      const Element* column = values + vector_in_tile % kUnit;
      CUTE_UNROLL
      for (int chunk = 0; chunk < kK / kChunk; ++chunk) {
        const int at = ring.index_of(cursor.record);
        if (cursor.record < records && (kLines == 1 || ring.present[at] >> line & 1)) {
          const int inner = cursor.part * kChunk + row_in_tile;
          const int left = extent_k - ring.inner[at] - inner;
          const Element* source = column + ring.block[at][line] + inner * block_width;
          constexpr int kChunkPasses = kChunk / kRowsPerPass;
          copy_passes<kChunkPasses, Element>(aligned, [&](int chunk_pass, auto copy) {
            int pass = chunk * kChunkPasses + chunk_pass;
            copy(stage + select_element(shared_offset, pass % kPhases) + pass / kPhases * kPeriodStep, source,
                 chunk_pass * kRowsPerPass < left ? kVector : 0);
            source += kRowsPerPass * block_width;
          });
        }
        cursor.advance(0, 1, chunks_per_block);
      }
    }
  }
};

}  // namespace block_sparse
