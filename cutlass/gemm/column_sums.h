// Sums of a matrix's columns, for sm_80 and later.
//
//   bias gradient  db [O] = sum of dy [T, O] over tokens
//
// A warp reads 32 vectors of a row side by side, a thread has kBatch rows under way. Where the rows are split, a second
// kernel adds the splits. (The last thread block of a column tile could do that too, but the counters that find it
// cost 6 µs.) Which rows are added in which order depends on neither timing nor alignment: results repeat bit by bit.
#pragma once

#include <cutlass/array.h>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <cute/config.hpp>

namespace block_sparse {

struct ColumnSumsParams {
  const void* input;  // [rows, columns]
  int64_t stride;     // from row to row, in elements
  int64_t rows;
  int64_t columns;
  int64_t split_rows;       // rows of one split
  void* result;             // [columns]
  float* partials;          // [splits, partial_columns]; null where there is one split
  int64_t partial_columns;  // columns, rounded up to a whole float4
};

template <class Element_, int kVector_>
struct ColumnSumsConfig {
  using Element = Element_;
  static constexpr int kVector = kVector_;  // elements of a load
  static constexpr int kWarps = 8;
  static constexpr int kWide = 1;  // warps side by side; the others take the rows in turn
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBatch = 8;      // rows that a thread reads at a time
  static constexpr int kRun = 64;       // batches that are added in one chain
  static constexpr int kMinBlocks = 3;  // thread blocks per multiprocessor
};

// Adds neighbours by halves; kCount is a power of two. `terms` are overwritten.
template <int kCount>
CUTE_DEVICE float tree_sum(float (&terms)[kCount]) {
  CUTE_UNROLL
  for (int width = kCount / 2; width > 0; width /= 2) {
    CUTE_UNROLL
    for (int i = 0; i < width; ++i) terms[i] += terms[i + width];
  }
  return terms[0];
}

// The sums of one thread's kVector columns over rows `row`, row + row_step, ... below `end`. kWhole: all columns exist,
// else `valid` of them.
template <class Config, bool kWhole>
CUTE_DEVICE void sum_rows(const ColumnSumsParams& params, int64_t row, int64_t end, int64_t column, int valid,
                          float (&sums)[Config::kVector]) {
  using Element = typename Config::Element;
  constexpr int kVector = Config::kVector, kBatch = Config::kBatch, kRowStep = Config::kWarps / Config::kWide;
  using Vector = cutlass::AlignedArray<Element, kVector>;
  const Element* from = static_cast<const Element*>(params.input) + row * params.stride + column;
  const int64_t step = kRowStep * params.stride;
  float run[kVector] = {};
  for (int batch = 1; row < end; ++batch, row += kBatch * kRowStep, from += kBatch * step) {
    Vector loaded[kBatch];
    CUTE_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      loaded[i].clear();
      if (row + i * kRowStep >= end) continue;
      if constexpr (kWhole && kVector > 1) {
        reinterpret_cast<uint4&>(loaded[i]) = __ldg(reinterpret_cast<const uint4*>(from + i * step));
      } else {
        CUTE_UNROLL
        for (int j = 0; j < kVector; ++j) {
          if (kWhole || j < valid) loaded[i][j] = from[i * step + j];
        }
      }
    }
    CUTE_UNROLL
    for (int j = 0; j < kVector; ++j) {
      float terms[kBatch];
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) terms[i] = float(loaded[i][j]);
      run[j] += tree_sum(terms);
    }
    if (batch % Config::kRun == 0 || row + kBatch * kRowStep >= end) {
      CUTE_UNROLL
      for (int j = 0; j < kVector; ++j) {
        sums[j] += run[j];
        run[j] = 0.f;
      }
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    column_sums(const __grid_constant__ ColumnSumsParams params) {
  using Element = typename Config::Element;
  constexpr int kVector = Config::kVector, kWide = Config::kWide, kRowStep = Config::kWarps / kWide;
  constexpr int kColumns = 32 * kVector * kWide;
  __shared__ float shared[kRowStep][kColumns];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int64_t first_column = int64_t(blockIdx.x) * kColumns;
  const int own_column = (warp % kWide * 32 + lane) * kVector;
  const int64_t column = first_column + own_column;
  const int valid = int(max(int64_t(0), min(int64_t(kVector), params.columns - column)));
  const int64_t row = blockIdx.y * params.split_rows + warp / kWide;
  const int64_t end = min(params.rows, (blockIdx.y + 1) * params.split_rows);

  float sums[kVector] = {};
  if (valid == kVector) {
    sum_rows<Config, true>(params, row, end, column, valid, sums);
  } else if (valid > 0) {
    sum_rows<Config, false>(params, row, end, column, valid, sums);
  }
  CUTE_UNROLL
  for (int j = 0; j < kVector; ++j) shared[warp / kWide][own_column + j] = sums[j];
  __syncthreads();
  for (int c = thread; c < kColumns && first_column + c < params.columns; c += Config::kThreads) {
    float parts[kRowStep];
    CUTE_UNROLL
    for (int i = 0; i < kRowStep; ++i) parts[i] = shared[i][c];
    const float total = tree_sum(parts);
    if (params.partials != nullptr) {
      params.partials[blockIdx.y * params.partial_columns + first_column + c] = total;
    } else {
      static_cast<Element*>(params.result)[first_column + c] = Element(total);
    }
  }
}

constexpr int kSplitSumsThreads = 256;
constexpr int kSplitSumsQuads = 8;  // of columns, in a thread block: few, so that many multiprocessors take part

// The groups of threads take the splits in turn.
template <class Element>
__global__ void __launch_bounds__(kSplitSumsThreads) split_sums(const float* partials,  // [splits, partial_columns]
                                                                int splits, int64_t partial_columns, int64_t columns,
                                                                Element* result) {  // [columns]
  constexpr int kGroups = kSplitSumsThreads / kSplitSumsQuads;
  __shared__ alignas(16) float shared[kGroups][4 * kSplitSumsQuads];
  const int quad = threadIdx.x % kSplitSumsQuads, group = threadIdx.x / kSplitSumsQuads;
  const int64_t first_column = int64_t(blockIdx.x) * (4 * kSplitSumsQuads);
  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
  if (first_column + 4 * quad < partial_columns) {
#pragma unroll 4
    for (int split = group; split < splits; split += kGroups) {
      const float4 one =
          __ldg(reinterpret_cast<const float4*>(partials + split * partial_columns + first_column) + quad);
      total.x += one.x, total.y += one.y, total.z += one.z, total.w += one.w;
    }
  }
  reinterpret_cast<float4*>(shared[group])[quad] = total;
  __syncthreads();
  const int c = threadIdx.x;
  if (c >= 4 * kSplitSumsQuads || first_column + c >= columns) return;
  float parts[kGroups];
  CUTE_UNROLL
  for (int i = 0; i < kGroups; ++i) parts[i] = shared[i][c];
  result[first_column + c] = Element(tree_sum(parts));
}

}  // namespace block_sparse
