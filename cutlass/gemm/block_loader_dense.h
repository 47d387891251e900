// Loads the dense operand (x or dy) into shared memory.
#pragma once

#include "gemm/copy_vector.h"

namespace block_sparse {

// dense x sparse: a tile of tokens, K-major. Columns are gathered: each thread is told where its vector's columns
// begin. Layout: (TOKENS, COLUMNS, STAGES).
template <class Element, class Layout, int kTokens, int kColumns, int kThreads>
struct TokenTileLoader {
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kVectorsPerRow = kColumns / kVector;
  static constexpr int kRowsPerPass = kThreads / kVectorsPerRow;
  static constexpr int kPasses = kTokens / kRowsPerPass;
  static constexpr int kPassStep = int(Layout{}(kRowsPerPass, 0, 0));
  static_assert(kTokens % kRowsPerPass == 0 && kRowsPerPass % 8 == 0, "rows of all passes have the same swizzle phase");

  const Element* row;  // first token of this thread, column 0
  int64_t pass_stride;
  int shared_offset;
  int column_in_tile;
  int rows_left;  // tokens from this thread's first to the last
  bool aligned;

  CUTE_DEVICE static int column_of(int thread) { return thread % kVectorsPerRow * kVector; }

  CUTE_DEVICE TokenTileLoader(const Element* input, int64_t stride, int64_t first_token, int64_t tokens, bool aligned,
                              int thread)
      : pass_stride(stride * kRowsPerPass), column_in_tile(column_of(thread)), aligned(aligned) {
    int row_in_tile = thread / kVectorsPerRow;
    row = input + (first_token + row_in_tile) * stride;
    shared_offset = Layout{}(row_in_tile, column_in_tile, 0);
    rows_left = int(min(tokens - first_token - row_in_tile, int64_t(kTokens)));
  }

  // `column`: of the input, where this thread's vector begins; columns from `columns` on are zero.
  CUTE_DEVICE void load(Element* stage, int column, int columns) const {
    const int valid = valid_elements<kVector>(column, columns);
    const Element* source = row + column;
    Element* target = stage + shared_offset;
    copy_passes<kPasses, Element>(aligned, [&](int pass, auto copy) {
      copy(target + pass * kPassStep, source, pass * kRowsPerPass < rows_left ? valid : 0);
      source += pass_stride;
    });
  }
};

// weight gradient: a tile of features gathered block by block, MN-major; the inner dimension is the tokens, which are
// visited in order. Layout: (FEATURES, TOKENS, STAGES).
template <class Element, class Layout, int kFeatures, int kTokens, int kThreads>
struct FeatureTileLoader {
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kVectorsPerToken = kFeatures / kVector;
  static constexpr int kTokensPerPass = kThreads / kVectorsPerToken;
  static constexpr int kPasses = (kTokens + kTokensPerPass - 1) / kTokensPerPass;
  // The swizzle repeats every 8 tokens: passes of fewer take turns in as many phases.
  static constexpr int kPhases = kTokensPerPass >= 8 ? 1 : 8 / kTokensPerPass;
  static constexpr int kPeriodStep = int(Layout{}(0, kPhases* kTokensPerPass, 0));

  const Element* source;  // this thread's vector of features at its first token of the next stage
  int64_t pass_stride;
  int64_t stage_stride;
  int shared_offset[kPhases];
  int token_in_tile;
  int valid;  // features of the vector that exist
  bool used;  // the tile has a block here
  bool aligned;

  CUTE_DEVICE static int feature_of(int thread) { return thread % kVectorsPerToken * kVector; }

  // `feature`: where this thread's vector begins in the tensor's rows of `features`.
  CUTE_DEVICE FeatureTileLoader(const Element* tensor, int64_t stride, int64_t first_token, int feature, int features,
                                bool used, bool aligned, int thread)
      : pass_stride(stride * kTokensPerPass),
        stage_stride(stride * kTokens),
        token_in_tile(thread / kVectorsPerToken),
        valid(valid_elements<kVector>(feature, features)),
        used(used && (kTokens % kTokensPerPass == 0 || token_in_tile < kTokens)),
        aligned(aligned) {
    static_assert(kTokens % kTokensPerPass == 0 || kTokensPerPass > kTokens);
    source = tensor + (first_token + token_in_tile) * stride + feature;
    CUTE_UNROLL
    for (int phase = 0; phase < kPhases; ++phase) {
      shared_offset[phase] = Layout{}(feature_of(thread), token_in_tile + phase * kTokensPerPass, 0);
    }
  }

  // Loads the next stage; tokens from `tokens` on are zero.
  CUTE_DEVICE void load_next(Element* stage, int tokens) {
    if (!used) return;
    const Element* vector = source;
    const int left = tokens - token_in_tile;
    copy_passes<kPasses, Element>(aligned, [&](int pass, auto copy) {
      copy(stage + (select_element(shared_offset, pass % kPhases) + pass / kPhases * kPeriodStep), vector,
           pass * kTokensPerPass < left ? valid : 0);
      vector += pass_stride;
    });
    source += stage_stride;
  }
};

}  // namespace block_sparse
