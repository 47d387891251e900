// Under autocast every floating-point operand takes the autocast dtype, as in nn.Linear.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "operators.h"

namespace block_sparse {
namespace {

using at::Tensor;

template <c10::DeviceType device>
struct Autocast {
  static Tensor cast(const Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_lower_precision_fp_from_device_type(device), tensor, device);
  }

  static c10::impl::ExcludeDispatchKeyGuard below() {
    return c10::impl::ExcludeDispatchKeyGuard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  }

  static Tensor linear(const Tensor& x, const Tensor& values, const std::optional<Tensor>& bias, const Tensor& index,
                       at::IntArrayRef geometry, c10::string_view activation) {
    const auto guard = below();
    return ops::linear(cast(x), cast(values), bias ? std::optional(cast(*bias)) : std::nullopt, index, geometry,
                       activation);
  }

  static Tensor input_grad(const Tensor& dy, const Tensor& values, const Tensor& index, at::IntArrayRef geometry) {
    const auto guard = below();
    return ops::input_grad(cast(dy), cast(values), index, geometry);
  }

  static Tensor linear_main_grad(const Tensor& x, const Tensor& values, const std::optional<Tensor>& bias,
                                 const Tensor& main_grad, const Tensor& index, at::IntArrayRef geometry,
                                 c10::string_view activation) {
    const auto guard = below();
    return ops::linear_main_grad(cast(x), cast(values), bias ? std::optional(cast(*bias)) : std::nullopt, main_grad,
                                 index, geometry, activation);
  }

  static Tensor weight_grad(const Tensor& dy, const Tensor& x, const Tensor& index, at::IntArrayRef geometry,
                            std::optional<at::ScalarType> out_dtype) {
    const auto guard = below();
    return ops::weight_grad(cast(dy), cast(x), index, geometry, out_dtype);
  }

  static void weight_grad_accumulate_(const Tensor& out, const Tensor& dy, const Tensor& x, const Tensor& index,
                                      at::IntArrayRef geometry) {
    const auto guard = below();
    ops::weight_grad_accumulate_(out, cast(dy), cast(x), index, geometry);
  }

  static void add_to(torch::Library& m) {
    m.impl("linear", linear);
    m.impl("input_grad", input_grad);
    m.impl("linear_main_grad", linear_main_grad);
    m.impl("weight_grad", weight_grad);
    m.impl("weight_grad_accumulate_", weight_grad_accumulate_);
    m.impl("bias_grad", torch::CppFunction::makeFallthrough());
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(pytorch_block_sparse, AutocastCPU, m) { Autocast<c10::kCPU>::add_to(m); }
TORCH_LIBRARY_IMPL(pytorch_block_sparse, AutocastCUDA, m) { Autocast<c10::kCUDA>::add_to(m); }

}  // namespace block_sparse
