// Launches the Hopper dense x sparse kernel for one element type; each .cu instantiates the type it names.
#pragma once

#include <algorithm>

#include "cuda_launch.h"
#include "gemm/block_task_sm90.h"
#include "tensor_map.h"
#include "work_list.h"

namespace block_sparse {

template <class Element, bool kTransposed>
const char* launch_block_task_sm90(const DenseSparseProblem& problem, const int32_t* work, int* counter,
                                   int multiprocessors, cudaStream_t stream) {
  using Config = sm90::BlockTaskConfig<Element, kTransposed>;
  constexpr int64_t kSide = sm90::kPieceSide;
  const Geometry& geometry = problem.geometry;
  const int64_t inner = kTransposed ? geometry.out_features : geometry.in_features;
  const int64_t features = kTransposed ? geometry.in_features : geometry.out_features;
  const int64_t groups = sm90::group_count(geometry, problem.direction);
  const int64_t token_tiles = (problem.tokens + Config::kTokens - 1) / Config::kTokens;
  if (token_tiles * groups > INT32_MAX >> sm90::StageControl::kTileShift) {
    return "block_sparse: the output has more than 2^28 tiles";
  }

  sm90::BlockTaskParams params{};
  // Strips measured on the H200: forward reads the pieces K-major and gains from reusing them over a few token tiles;
  // the input gradient is fastest when all thread blocks share one token tile.
  const int64_t strip = kTransposed ? 1 : 4;
  params.raster = {int(token_tiles), int(groups), int(std::min(strip, token_tiles))};
  params.work = work;
  params.counter = counter;
  params.pieces_per_row = int(geometry.block_width / kSide);
  params.features = int(features);
  params.bias = problem.bias;
  params.activation = EpilogueActivation(int(problem.activation));

  CUtensorMap input_map, values_map, output_map;
  const int64_t value_rows = geometry.nnz * geometry.block_height;
  constexpr CUtensorMapDataType kType =
      std::is_same_v<Element, cutlass::bfloat16_t> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const char* error = encode_tensor_map(&input_map, kType, problem.input, problem.tokens, inner, problem.input_stride,
                                        Config::kTokens, kSide);
  if (!error) {
    error = encode_tensor_map(&values_map, kType, problem.values, value_rows, geometry.block_width,
                              geometry.block_width, kSide, kSide);
  }
  if (!error) {
    error = encode_tensor_map(&output_map, kType, problem.output, problem.tokens, features, features,
                              sm90::DeferredStore<Element>::kPassTokens, kSide);
  }
  if (error) return error;
  const int64_t blocks = std::min(token_tiles * groups, int64_t(multiprocessors));
  return launch(sm90::block_task<Config>, dim3(unsigned(blocks)), Config::kThreads,
                sizeof(typename Config::SharedStorage), stream, input_map, values_map, output_map, params);
}

}  // namespace block_sparse
