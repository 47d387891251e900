// The native module: operator schemas, checks, the CPU and CUDA entries, and what Python asks about the build.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "cpu/cpu_kernels.h"
#include "cuda_backend.h"
#include "cuda_plans.h"
#include "decode_plan.h"
#include "densify_mode.h"
#include "operators.h"
#include "packed_index.h"
#include "plan_record.h"
#include "work_list.h"

namespace block_sparse {
namespace ops {

namespace {

// A typed handle of one operator, looked up once.
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& values, const std::optional<at::Tensor>& bias,
                  const at::Tensor& index, at::IntArrayRef geometry, c10::string_view activation) {
  static const auto op = find<decltype(linear)>("pytorch_block_sparse::linear");
  return op.call(x, values, bias, index, geometry, activation);
}

at::Tensor input_grad(const at::Tensor& dy, const at::Tensor& values, const at::Tensor& index,
                      at::IntArrayRef geometry) {
  static const auto op = find<decltype(input_grad)>("pytorch_block_sparse::input_grad");
  return op.call(dy, values, index, geometry);
}

at::Tensor weight_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& index, at::IntArrayRef geometry,
                       std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(weight_grad)>("pytorch_block_sparse::weight_grad");
  return op.call(dy, x, index, geometry, out_dtype);
}

void weight_grad_accumulate_(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& index,
                             at::IntArrayRef geometry) {
  static const auto op = find<decltype(weight_grad_accumulate_)>("pytorch_block_sparse::weight_grad_accumulate_");
  op.call(out, dy, x, index, geometry);
}

at::Tensor linear_main_grad(const at::Tensor& x, const at::Tensor& values, const std::optional<at::Tensor>& bias,
                            const at::Tensor& main_grad, const at::Tensor& index, at::IntArrayRef geometry,
                            c10::string_view activation) {
  static const auto op = find<decltype(linear_main_grad)>("pytorch_block_sparse::linear_main_grad");
  return op.call(x, values, bias, main_grad, index, geometry, activation);
}

at::Tensor bias_grad(const at::Tensor& dy) {
  static const auto op = find<decltype(bias_grad)>("pytorch_block_sparse::bias_grad");
  return op.call(dy);
}

Activation parse_activation(c10::string_view name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "silu") return Activation::kSilu;
  TORCH_CHECK_VALUE(false, "activation must be one of none, relu, gelu, gelu_tanh, silu, got ", name);
}

}  // namespace ops

namespace {

using at::Tensor;

Geometry parse_geometry(at::IntArrayRef geometry) {
  TORCH_CHECK_VALUE(geometry.size() == 5,
                    "geometry must be [out_features, in_features, block height, block width, nnz], got ", geometry);
  const Geometry result{geometry[0], geometry[1], geometry[2], geometry[3], geometry[4]};
  TORCH_CHECK_VALUE(result.out_features > 0 && result.in_features > 0 && result.block_height > 0 &&
                        result.block_width > 0 && result.nnz >= 0,
                    "geometry must hold positive sizes and nnz >= 0, got ", geometry);
  return result;
}

DType parse_dtype(const char* name, at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return DType::kFloat64;
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK_VALUE(false, name, " must be float64, float32, bfloat16 or float16, got ", dtype);
  }
}

DType parse_dtype(const char* name, const Tensor& tensor) { return parse_dtype(name, tensor.scalar_type()); }

// What a weight gradient of `operands` may be written in.
void check_gradient_dtype(const char* name, at::ScalarType dtype, at::ScalarType operands) {
  TORCH_CHECK_VALUE(dtype == operands || (dtype == at::kFloat && (operands == at::kBFloat16 || operands == at::kHalf)),
                    name, " must be the operands' dtype (", operands, "), or float32 where that has 16 bits, got ",
                    dtype);
}

// `tensor` must have the dtype and device of `other`.
void check_like(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == other.scalar_type(), name, " must have the dtype of ", other_name, " (",
                    other.scalar_type(), "), got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.device() == other.device(), name, " must be on the device of ", other_name, " (",
                    other.device(), "), got ", tensor.device());
}

void check_features(const char* name, const Tensor& tensor, int64_t features) {
  TORCH_CHECK_VALUE(tensor.dim() >= 1 && tensor.size(-1) == features, name, " must be [..., ", features, "], got ",
                    tensor.sizes());
}

void check_blocks(const char* name, const Tensor& blocks, const Geometry& geometry) {
  const std::array<int64_t, 3> sizes{geometry.nnz, geometry.block_height, geometry.block_width};
  TORCH_CHECK_VALUE(blocks.sizes() == at::IntArrayRef(sizes), name, " must be ", at::IntArrayRef(sizes), ", got ",
                    blocks.sizes());
}

// A tensor that a weight gradient of operands like `like` is added to.
void check_gradient_sum(const char* name, const Tensor& sum, const Geometry& geometry, const Tensor& like) {
  check_blocks(name, sum, geometry);
  check_gradient_dtype((std::string(name) + "'s dtype").c_str(), sum.scalar_type(), like.scalar_type());
  TORCH_CHECK_VALUE(sum.device() == like.device(), name, " must be on the device of the operands (", like.device(),
                    "), got ", sum.device());
  TORCH_CHECK_VALUE(sum.is_contiguous(), name, " must be contiguous, got strides ", sum.strides());
}

PatternIndex check_index(const Tensor& index, const Geometry& geometry, const Tensor& like) {
  TORCH_CHECK_VALUE(index.device() == like.device(), "index must be on the device of the operands (", like.device(),
                    "), got ", index.device());
  const int64_t size = packed_index_size(geometry.grid_rows(), geometry.grid_cols(), geometry.nnz);
  const bool has_work_lists = index.is_cuda() && index.numel() > size;
  TORCH_CHECK_VALUE(index.scalar_type() == at::kInt && index.dim() == 1 && index.is_contiguous() &&
                        index.numel() == size + (has_work_lists ? work_lists_size(geometry) : 0),
                    "index must be the packed index of a BlockPattern (int32, contiguous, ", size, " elements), got ",
                    index.scalar_type(), " ", index.sizes());
  PatternIndex pattern = unpack_index(index.const_data_ptr<int32_t>(), geometry);
  if (has_work_lists) pattern.work_lists = index.const_data_ptr<int32_t>() + size;
  // Another pattern's index may have the same length. The end of both offset arrays tells them apart, where it can be
  // read.
  TORCH_CHECK_VALUE(!index.is_cpu() || (pattern.crow_indices[geometry.grid_rows()] == geometry.nnz &&
                                        pattern.ccol_indices[geometry.grid_cols()] == geometry.nnz),
                    "index must belong to the pattern that geometry describes");
  return pattern;
}

// What runs a product of aligned operands. `hopper`: whether Hopper's kernels may.
[[maybe_unused]] Kernel kernel_of(const Product& product, bool hopper) {
  const Direction direction = product.op == Operator::kForward ? Direction::kForward : Direction::kInputGradient;
  const bool decode = product.op != Operator::kWeightGradient &&
                      decode_serves(direction, product.dtype, product.geometry, product.tokens);
  return choose_kernel(direction, product.geometry, product.tokens, decode, hopper);
}

// A tensor [..., F] as rows [T, F] that are contiguous each: a view where the strides allow it, else one copy.
struct Rows {
  Tensor tensor;
  int64_t count;
  int64_t stride;

  Rows(const Tensor& source, int64_t features) : tensor(source) {
    if (source.dim() != 2 || source.stride(1) != 1) {
      tensor = source.reshape({source.numel() / features, features});
      if (tensor.stride(1) != 1) tensor = tensor.contiguous();
    }
    count = tensor.size(0);
    stride = tensor.stride(0);
  }
};

Tensor empty_rows(const Tensor& like, int64_t features) {
  at::DimVector sizes(like.sizes());
  sizes.back() = features;
  return at::empty(sizes, like.options());
}

// The operators, the same for every device; `run` is what computes there.

template <void (*run)(const DenseSparseProblem&)>
Tensor linear(const Tensor& x, const Tensor& values, const std::optional<Tensor>& bias, const Tensor& index,
              at::IntArrayRef geometry_list, c10::string_view activation) {
  const Geometry geometry = parse_geometry(geometry_list);
  const DType dtype = parse_dtype("x", x);
  check_features("x", x, geometry.in_features);
  check_like("values", values, "x", x);
  check_blocks("values", values, geometry);
  if (bias) {
    check_like("bias", *bias, "x", x);
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == geometry.out_features, "bias must be [",
                      geometry.out_features, "], got ", bias->sizes());
  }
  const PatternIndex pattern = check_index(index, geometry, x);
  const Activation parsed_activation = ops::parse_activation(activation);

  Tensor y = empty_rows(x, geometry.out_features);
  if (y.numel() == 0) return y;
  const Rows rows(x, geometry.in_features);
  const Tensor packed_values = values.contiguous();
  const Tensor packed_bias = bias ? bias->contiguous() : Tensor();
  const c10::DeviceGuard guard(x.device());
  run({
      .direction = Direction::kForward,
      .dtype = dtype,
      .geometry = geometry,
      .index = pattern,
      .tokens = rows.count,
      .input = rows.tensor.const_data_ptr(),
      .input_stride = rows.stride,
      .values = packed_values.const_data_ptr(),
      .bias = bias ? packed_bias.const_data_ptr() : nullptr,
      .activation = parsed_activation,
      .output = y.mutable_data_ptr(),
  });
  return y;
}

template <void (*run)(const DenseSparseProblem&)>
Tensor input_grad(const Tensor& dy, const Tensor& values, const Tensor& index, at::IntArrayRef geometry_list) {
  const Geometry geometry = parse_geometry(geometry_list);
  const DType dtype = parse_dtype("dy", dy);
  check_features("dy", dy, geometry.out_features);
  check_like("values", values, "dy", dy);
  check_blocks("values", values, geometry);
  const PatternIndex pattern = check_index(index, geometry, dy);

  Tensor dx = empty_rows(dy, geometry.in_features);
  if (dx.numel() == 0) return dx;
  const Rows rows(dy, geometry.out_features);
  const Tensor packed_values = values.contiguous();
  const c10::DeviceGuard guard(dy.device());
  run({
      .direction = Direction::kInputGradient,
      .dtype = dtype,
      .geometry = geometry,
      .index = pattern,
      .tokens = rows.count,
      .input = rows.tensor.const_data_ptr(),
      .input_stride = rows.stride,
      .values = packed_values.const_data_ptr(),
      .bias = nullptr,
      .activation = Activation::kNone,
      .output = dx.mutable_data_ptr(),
  });
  return dx;
}

// The checked problem of a weight gradient, all but its result.
struct SparseSupportOperands {
  Geometry geometry;
  SparseSupportProblem problem;
  std::optional<Rows> dy_rows, x_rows;  // without them there are no tokens or no blocks
};

SparseSupportOperands sparse_support_operands(const Tensor& dy, const Tensor& x, const Tensor& index,
                                              at::IntArrayRef geometry_list) {
  const Geometry geometry = parse_geometry(geometry_list);
  const DType dtype = parse_dtype("dy", dy);
  check_features("dy", dy, geometry.out_features);
  check_features("x", x, geometry.in_features);
  check_like("x", x, "dy", dy);
  TORCH_CHECK_VALUE(dy.sizes().slice(0, dy.dim() - 1) == x.sizes().slice(0, x.dim() - 1),
                    "x must have the leading dimensions of dy ", dy.sizes(), ", got ", x.sizes());
  const PatternIndex pattern = check_index(index, geometry, dy);

  SparseSupportOperands result{.geometry = geometry};
  if (dy.numel() == 0 || geometry.nnz == 0) return result;
  result.dy_rows.emplace(dy, geometry.out_features);
  result.x_rows.emplace(x, geometry.in_features);
  result.problem = {
      .dtype = dtype,
      .geometry = geometry,
      .index = pattern,
      .tokens = result.dy_rows->count,
      .output_gradient = result.dy_rows->tensor.const_data_ptr(),
      .output_gradient_stride = result.dy_rows->stride,
      .input = result.x_rows->tensor.const_data_ptr(),
      .input_stride = result.x_rows->stride,
  };
  return result;
}

template <void (*run)(const SparseSupportProblem&)>
Tensor weight_grad(const Tensor& dy, const Tensor& x, const Tensor& index, at::IntArrayRef geometry_list,
                   std::optional<at::ScalarType> out_dtype) {
  if (out_dtype) check_gradient_dtype("out_dtype", *out_dtype, dy.scalar_type());
  SparseSupportOperands operands = sparse_support_operands(dy, x, index, geometry_list);
  const Geometry& geometry = operands.geometry;
  const std::array<int64_t, 3> sizes{geometry.nnz, geometry.block_height, geometry.block_width};
  const at::TensorOptions options = dy.options().dtype(out_dtype.value_or(dy.scalar_type()));
  if (!operands.dy_rows) return at::zeros(sizes, options);
  Tensor dw = at::empty(sizes, options);
  operands.problem.result_dtype = parse_dtype("out_dtype", dw);
  operands.problem.accumulate = false;
  operands.problem.values_gradient = dw.mutable_data_ptr();
  const c10::DeviceGuard guard(dy.device());
  run(operands.problem);
  return dw;
}

template <void (*run)(const SparseSupportProblem&)>
void weight_grad_accumulate_(const Tensor& out, const Tensor& dy, const Tensor& x, const Tensor& index,
                             at::IntArrayRef geometry_list) {
  SparseSupportOperands operands = sparse_support_operands(dy, x, index, geometry_list);
  check_gradient_sum("out", out, operands.geometry, dy);
  if (!operands.dy_rows) return;
  operands.problem.result_dtype = parse_dtype("out", out);
  operands.problem.accumulate = true;
  operands.problem.values_gradient = out.mutable_data_ptr();
  const c10::DeviceGuard guard(dy.device());
  run(operands.problem);
}

// Below autograd it is linear; main_grad is checked here, so that an error does not come in the backward.
template <void (*run)(const DenseSparseProblem&)>
Tensor linear_main_grad(const Tensor& x, const Tensor& values, const std::optional<Tensor>& bias,
                        const Tensor& main_grad, const Tensor& index, at::IntArrayRef geometry,
                        c10::string_view activation) {
  check_gradient_sum("main_grad", main_grad, parse_geometry(geometry), x);
  return linear<run>(x, values, bias, index, geometry, activation);
}

// dy [..., O] as [T, O]
Tensor bias_grad_rows(const Tensor& dy) {
  parse_dtype("dy", dy);
  TORCH_CHECK_VALUE(dy.dim() >= 1, "dy must be [..., out_features], got ", dy.sizes());
  return dy.dim() == 2 ? dy : dy.reshape({dy.numel() / std::max<int64_t>(dy.size(-1), 1), dy.size(-1)});
}

Tensor bias_grad(const Tensor& dy) { return at::sum(bias_grad_rows(dy), {0}); }

#ifdef BLOCK_SPARSE_WITH_CUDA
// PyTorch's own sum takes float64, and rows that are not contiguous (an expanded gradient) without a copy.
Tensor bias_grad_cuda(const Tensor& dy) {
  const Tensor rows = bias_grad_rows(dy);
  if (dy.scalar_type() == at::kDouble || rows.numel() == 0 || rows.stride(1) != 1) return at::sum(rows, {0});
  Tensor db = at::empty({rows.size(1)}, dy.options());
  const c10::DeviceGuard guard(dy.device());
  cuda::bias_grad({
      .dtype = parse_dtype("dy", dy),
      .tokens = rows.size(0),
      .features = rows.size(1),
      .output_gradient = rows.const_data_ptr(),
      .output_gradient_stride = rows.stride(0),
      .bias_gradient = db.mutable_data_ptr(),
  });
  return db;
}
#endif

// The Hopper kernels' work lists of a pattern, from its packed index.
Tensor work_lists(const Tensor& index, at::IntArrayRef geometry_list) {
  const Geometry geometry = parse_geometry(geometry_list);
  const PatternIndex pattern = check_index(index, geometry, index);
  Tensor work = at::zeros({work_lists_size(geometry)}, index.options());
  build_work_lists(geometry, pattern, work.mutable_data_ptr<int32_t>());
  return work;
}

#ifndef BLOCK_SPARSE_WITH_CUDA
template <class... Arguments>
Tensor no_cuda(Arguments...) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "pytorch_block_sparse was built without its CUDA kernels, but got a CUDA tensor. Rebuild it "
      "with a CUDA build of PyTorch and nvcc on the PATH: pip install --no-build-isolation "
      "--force-reinstall --no-deps . (python -m pytorch_block_sparse info shows what was built)");
}
#endif

}  // namespace

TORCH_LIBRARY(pytorch_block_sparse, m) {
  m.set_python_module("pytorch_block_sparse.ops");
  m.def(
      "linear(Tensor x, Tensor values, Tensor? bias, Tensor index, int[] geometry, str activation=\"none\") -> Tensor");
  m.def("input_grad(Tensor dy, Tensor values, Tensor index, int[] geometry) -> Tensor");
  m.def(
      "linear_main_grad(Tensor x, Tensor values, Tensor? bias, Tensor main_grad, Tensor index, int[] geometry, "
      "str activation=\"none\") -> Tensor");
  m.def("weight_grad(Tensor dy, Tensor x, Tensor index, int[] geometry, ScalarType? out_dtype=None) -> Tensor");
  m.def("weight_grad_accumulate_(Tensor(a!) out, Tensor dy, Tensor x, Tensor index, int[] geometry) -> ()");
  m.def("bias_grad(Tensor dy) -> Tensor");
  m.def("work_lists(Tensor index, int[] geometry) -> Tensor");
}

TORCH_LIBRARY_IMPL(pytorch_block_sparse, CPU, m) {
  m.impl("linear", linear<cpu::dense_sparse>);
  m.impl("input_grad", input_grad<cpu::dense_sparse>);
  m.impl("linear_main_grad", linear_main_grad<cpu::dense_sparse>);
  m.impl("weight_grad", weight_grad<cpu::sparse_support>);
  m.impl("weight_grad_accumulate_", weight_grad_accumulate_<cpu::sparse_support>);
  m.impl("bias_grad", bias_grad);
  m.impl("work_lists", work_lists);
}

TORCH_LIBRARY_IMPL(pytorch_block_sparse, CUDA, m) {
#ifdef BLOCK_SPARSE_WITH_CUDA
  m.impl("linear", linear<cuda::dense_sparse>);
  m.impl("input_grad", input_grad<cuda::dense_sparse>);
  m.impl("linear_main_grad", linear_main_grad<cuda::dense_sparse>);
  m.impl("weight_grad", weight_grad<cuda::sparse_support>);
  m.impl("weight_grad_accumulate_", weight_grad_accumulate_<cuda::sparse_support>);
  m.impl("bias_grad", bias_grad_cuda);
#else
  m.impl("linear", no_cuda<const Tensor&, const Tensor&, const std::optional<Tensor>&, const Tensor&, at::IntArrayRef,
                           c10::string_view>);
  m.impl("input_grad", no_cuda<const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef>);
  m.impl("linear_main_grad", no_cuda<const Tensor&, const Tensor&, const std::optional<Tensor>&, const Tensor&,
                                     const Tensor&, at::IntArrayRef, c10::string_view>);
  m.impl("weight_grad",
         no_cuda<const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef, std::optional<at::ScalarType>>);
  m.impl("weight_grad_accumulate_",
         [](const Tensor&, const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef) { no_cuda(); });
  m.impl("bias_grad", no_cuda<const Tensor&>);
#endif
}

}  // namespace block_sparse

// A plain operator library, for inference from C++, is the same files without this block.
#ifndef BLOCK_SPARSE_WITHOUT_PYTHON
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

PYBIND11_MODULE(block_sparse_native, m) {
  m.doc() = "Operators and kernels of pytorch_block_sparse; importing it registers torch.ops.pytorch_block_sparse.";
#ifdef BLOCK_SPARSE_WITH_CUDA
  m.attr("with_cuda") = true;
  m.def(
      "cuda_path", [] { return block_sparse::cuda::hopper_path() ? "sm90" : "sm80"; },
      "The most capable kernels that may run on the current device.");
  m.def(
      "cuda_plans",
      [] {
        std::vector<std::array<std::string, 3>> plans;
        for (const auto& plan : block_sparse::cuda_plans(block_sparse::cuda::hopper_path())) {
          plans.push_back({plan.dtype, plan.blocks, plan.kernel});
        }
        return plans;
      },
      "(dtype, blocks, kernel) of the current device.");
#else
  m.attr("with_cuda") = false;
#endif
  m.def(
      "densify_mode", [] { return block_sparse::densify_mode_name(block_sparse::densify_mode()); },
      "When CUDA products run as densify + cuBLAS: auto, never or always.");
  m.def(
      "set_densify_mode",
      [](const std::string& mode) { block_sparse::set_densify_mode(block_sparse::parse_densify_mode("mode", mode)); },
      "Of the process.", pybind11::arg("mode"));
  m.def(
      "last_plan",
      []() -> std::optional<std::string> {
        const auto plan = block_sparse::last_plan();
        if (plan == block_sparse::Plan::kNone) return std::nullopt;
        return block_sparse::plan_name(plan);
      },
      "The plan of this thread's last CUDA product: sm90, sm80, decode or densify; None before any.");
  m.def(
      "densify_choice",
      [](const std::string& operator_name, const std::string& dtype, const std::vector<int64_t>& geometry,
         int64_t tokens, const std::string& activation, bool hopper, std::array<int, 2> compute_capability,
         int multiprocessors, int64_t memory, const std::string& mode) {
        block_sparse::Product product{};
        block_sparse::parse_names(operator_name, dtype, &product);
        product.activation = block_sparse::ops::parse_activation(activation);
        product.geometry = block_sparse::parse_geometry(geometry);
        product.tokens = tokens;
        product.kernel = block_sparse::kernel_of(product, hopper);
        const block_sparse::Gpu gpu{compute_capability[0], compute_capability[1], multiprocessors, memory};
        const auto seconds = block_sparse::predict_seconds(product, gpu);
        return std::tuple(block_sparse::chooses_densify(product, gpu, block_sparse::parse_densify_mode("mode", mode)),
                          seconds.blocks, seconds.densify);
      },
      "(whether it densifies, predicted seconds on the blocks, predicted seconds densified); memory in bytes.",
      pybind11::arg("operator"), pybind11::arg("dtype"), pybind11::arg("geometry"), pybind11::arg("tokens"),
      pybind11::arg("activation") = "none", pybind11::arg("hopper") = true,
      pybind11::arg("compute_capability") = std::array<int, 2>{9, 0}, pybind11::arg("multiprocessors") = 132,
      pybind11::arg("memory") = int64_t(140) << 30, pybind11::arg("mode") = "auto");
  m.def("cpu_capability", &block_sparse::cpu::capability, "Instruction set of the CPU kernels that run here.");
  m.def("cpu_bfloat16_arithmetic", &block_sparse::cpu::bfloat16_arithmetic,
        "How bfloat16 is multiplied on the CPU: brgemm, pairs or float32.");
  m.def("cpu_threads", &block_sparse::cpu::measured_threads, "Threads that a parallel region really ran on.");
  m.def("packed_index_size", &block_sparse::packed_index_size, "Length of a packed index, in int32 elements.",
        pybind11::arg("grid_rows"), pybind11::arg("grid_cols"), pybind11::arg("nnz"));
  m.def(
      "work_lists_size",
      [](const std::vector<int64_t>& geometry) {
        return block_sparse::work_lists_size(block_sparse::parse_geometry(geometry));
      },
      "Length of the Hopper kernels' work lists, in int32 elements.", pybind11::arg("geometry"));
}
#endif
