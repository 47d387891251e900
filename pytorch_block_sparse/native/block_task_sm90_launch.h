// Launches the Hopper dense x sparse kernel for one element type; each .cu instantiates the type it names.
#pragma once

#include <algorithm>

#include "cuda_launch.h"
#include "cuda_launch_ticket.h"
#include "cuda_tensor_map.h"
#include "gemm/block_task_sm90.h"
#include "work_list.h"

namespace block_sparse {

template <class Config>
const char* launch_sm90_config(const DenseSparseProblem& problem, uint64_t* counter, int multiprocessors,
                               cudaStream_t stream) {
  using Work = typename Config::Work;
  const Geometry& geometry = problem.geometry;
  const int64_t inner = Config::kTransposed ? geometry.out_features : geometry.in_features;
  const int64_t features = Config::kTransposed ? geometry.in_features : geometry.out_features;
  const int64_t groups = sm90::group_count(geometry, problem.direction);
  const int64_t token_tiles = (problem.tokens + Config::kTokens - 1) / Config::kTokens;
  const int64_t tiles = token_tiles * groups;
  if (tiles > sm90::kMostTiles) return "block_sparse: the output has 2^28 tiles or more";
  // Multiprocessors come in pairs that share what a cluster needs: all of these run at once (66 of two on an H200, says
  // cudaOccupancyMaxActiveClusters). If some could not, they would start when others end, which is slower but right.
  const int64_t clusters = std::min(tiles, int64_t(multiprocessors / Config::kCluster));

  sm90::TaskParams<Work> params{};
  // No box has more rows than there are tokens.
  const int tile_tokens = int(std::min<int64_t>(problem.tokens, Config::kTokens));
  const int input_rows = Config::share_tokens(tile_tokens);
  const int store_tokens = std::min(tile_tokens, Config::kStoreTokens);
  // Tiles that are started longest first: as many as run at a time or twice so, but no more token tiles than L2 holds.
  const int64_t last_tiles = Config::kTransposed ? clusters : 2 * clusters;
  const int64_t last_strip = std::max(Config::kStripTiles, (last_tiles + groups - 1) / groups);
  params.raster = {int(token_tiles),
                   int(groups),
                   int(std::min(Config::kStripTiles, token_tiles)),
                   int(std::min(last_strip, token_tiles)),
                   int(problem.tokens),
                   tile_tokens};
  params.work = sm90::dense_sparse_work<Work>(geometry, problem.direction, problem.index.work_lists);
  if (clusters < tiles) params.counter = {counter, next_ticket(sm90::kTicketBits)};
  params.values = problem.values;
  params.row_elements = int(geometry.block_width);
  params.pieces_per_row = int(geometry.block_width / Work::kSide);
  params.features = int(features);
  params.bias = problem.bias;
  params.activation = EpilogueActivation(int(problem.activation));

  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  const DType dtype = problem.dtype;
  const int64_t value_rows = geometry.nnz * geometry.block_height;
  const int64_t value_columns = geometry.block_width;
  CUtensorMap input_map, pair_map{}, values_map{}, output_map;
  const char* error = encode_tensor_map(
      {dtype, problem.input, problem.tokens, inner, problem.input_stride, input_rows, Work::kChunkInputs, kPromotion},
      &input_map);
  if (!error && Work::kChunks == 2) {
    error = encode_tensor_map(
        {dtype, problem.input, problem.tokens, inner, problem.input_stride, input_rows, sm90::kItemInputs, kPromotion},
        &pair_map);
  }
  if (!error && !Config::kCopiesPieces) {
    error = encode_tensor_map(
        {dtype, problem.values, value_rows, value_columns, value_columns, Work::kSide, Work::kSide, kPromotion},
        &values_map);
  }
  if (!error) {
    error = encode_tensor_map(
        {dtype, problem.output, problem.tokens, features, features, store_tokens, Work::kSide, kPromotion},
        &output_map);
  }
  if (error) return error;
  const dim3 grid(unsigned(clusters * Config::kCluster));
  constexpr size_t kSharedBytes = sizeof(typename Config::SharedStorage);
  if constexpr (Config::kCluster == 1) {
    return launch(sm90::block_task<Config>, grid, Config::kThreads, kSharedBytes, stream, input_map, pair_map,
                  values_map, output_map, params);
  } else {
    return launch_clusters(sm90::block_task<Config>, Config::kCluster, grid, Config::kThreads, kSharedBytes, stream,
                           input_map, pair_map, values_map, output_map, params);
  }
}

template <class Element, bool kTransposed>
const char* launch_sm90_direction(const DenseSparseProblem& problem, uint64_t* counter, int multiprocessors,
                                  cudaStream_t stream) {
  // A tile leaves in passes behind the next tile's products: in few, if these are few.
  constexpr int64_t kFewProducts = 10;  // of 64 x 64 elements of W
  const Geometry& geometry = problem.geometry;
  const int64_t products = geometry.nnz * geometry.block_height * geometry.block_width / (64 * 64);
  const int cluster = sm90::cluster_size(geometry, problem.direction);
  const bool few = products <= kFewProducts * cluster * sm90::group_count(geometry, problem.direction);
  const auto launch_work = [&]<class Work>() {
    using FewPasses = sm90::BlockTaskConfig<Element, Work, kTransposed, 128>;
    using ManyPasses = sm90::BlockTaskConfig<Element, Work, kTransposed, 64>;
    return few ? launch_sm90_config<FewPasses>(problem, counter, multiprocessors, stream)
               : launch_sm90_config<ManyPasses>(problem, counter, multiprocessors, stream);
  };
  switch (sm90::dense_sparse_side(problem.geometry)) {
    case 64:
      return launch_work.template operator()<sm90::WideWork>();
    case 32:
      return cluster == 1 ? launch_work.template operator()<sm90::NarrowWork<32>>()
                          : launch_work.template operator()<sm90::NarrowWork<32, 2>>();
    default:
      return launch_work.template operator()<sm90::NarrowWork<16>>();
  }
}

template <class Element>
const char* launch_block_task_sm90_element(const DenseSparseProblem& problem, uint64_t* counter, int multiprocessors,
                                           cudaStream_t stream) {
  return problem.direction == Direction::kForward
             ? launch_sm90_direction<Element, false>(problem, counter, multiprocessors, stream)
             : launch_sm90_direction<Element, true>(problem, counter, multiprocessors, stream);
}

}  // namespace block_sparse
