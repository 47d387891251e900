// Launches block_task_back_sm90 for one type of operands and results; each .cu instantiates what it names.
#pragma once

#include "block_task_back_sm90_call.h"
#include "cuda_launch.h"
#include "cuda_tensor_map.h"
#include "gemm/block_task_back_sm90.h"

namespace block_sparse {

template <class Config>
const char* launch_back_sm90_config(const BackSm90Call& call) {
  const SparseSupportProblem& problem = call.problem;
  const Geometry& geometry = problem.geometry;
  BackOperandMaps maps;
  for (int i = 0; i < 2; ++i) {
    if (const char* message =
            encode_tensor_map({problem.dtype, problem.input, problem.tokens, geometry.in_features, problem.input_stride,
                               back_stage_tokens(i), Config::kPiece, CU_TENSOR_MAP_L2_PROMOTION_L2_128B},
                              &maps.input[i])) {
      return message;
    }
    if (const char* message = encode_tensor_map(
            {problem.dtype, problem.output_gradient, problem.tokens, geometry.out_features,
             problem.output_gradient_stride, back_stage_tokens(i), Config::kPiece, CU_TENSOR_MAP_L2_PROMOTION_L2_128B},
            &maps.output_gradient[i])) {
      return message;
    }
  }
  BlockTaskBackSm90Params params{};
  params.work = call.work;
  params.tokens = int(problem.tokens);
  params.may_split = call.plan.counter_bytes > 0;
  params.ticket = call.ticket;
  auto* workspace = static_cast<char*>(call.workspace);
  params.counters = reinterpret_cast<uint64_t*>(workspace);
  workspace += call.plan.counter_bytes;
  params.progress = reinterpret_cast<uint32_t*>(workspace);
  params.window = call.plan.window;
  workspace += call.plan.progress_bytes;
  params.partials = reinterpret_cast<float4*>(workspace);
  params.epilogue = {problem.values_gradient, int(geometry.block_height), int(geometry.block_width),
                     back_cell(geometry.block_height, geometry.block_width), problem.accumulate};
  return launch(block_task_back_sm90<Config>, dim3(call.plan.thread_blocks), Config::kThreads, Config::kSharedBytes,
                call.stream, maps, params);
}

template <class Element, class Result, bool kPaced>
const char* launch_back_sm90(const BackSm90Call& call) {
  const Geometry& geometry = call.problem.geometry;
  return back_piece(geometry.block_height, geometry.block_width) == 64
             ? launch_back_sm90_config<BlockTaskBackSm90Config<Element, Result, 64, kPaced>>(call)
             : launch_back_sm90_config<BlockTaskBackSm90Config<Element, Result, 32, kPaced>>(call);
}

}  // namespace block_sparse
