// The one place that reads which gradients are needed. The operators are bilinear in each other, so each one's
// derivative is another of them, and gradients of every order come from these formulas.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "operators.h"

namespace block_sparse {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool needs_graph(std::initializer_list<const Tensor*> inputs) {
  if (!at::GradMode::is_enabled()) return false;
  for (const Tensor* input : inputs) {
    if (input->defined() && input->requires_grad()) return true;
  }
  return false;
}

// What a node keeps: an operand only where the other's gradient is wanted, so a frozen layer keeps no activations.
// (needs_input_grad would be wrong here: inside a running backward it speaks of that backward's targets.)
void save(AutogradContext* ctx, const Tensor& first, const Tensor& second, const Tensor& index,
          at::IntArrayRef geometry) {
  ctx->set_materialize_grads(false);
  ctx->save_for_backward({second.requires_grad() ? first : Tensor(), first.requires_grad() ? second : Tensor(), index});
  ctx->saved_data["geometry"] = geometry.vec();
}

struct Saved {
  Tensor first, second, index;
  std::vector<int64_t> geometry;

  explicit Saved(AutogradContext* ctx) : geometry(ctx->saved_data["geometry"].toIntVector()) {
    const variable_list saved = ctx->get_saved_variables();
    first = saved[0];
    second = saved[1];
    index = saved[2];
  }
};

// y = x Wᵀ + bias
struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& values, const std::optional<Tensor>& bias,
                        const Tensor& index, at::IntArrayRef geometry) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    save(ctx, x, values, index, geometry);
    return ops::linear(x, values, bias, index, geometry, "none");
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& dy = grads[0];
    variable_list result(5);
    if (!dy.defined()) return result;
    const Saved saved(ctx);
    if (ctx->needs_input_grad(0)) result[0] = ops::input_grad(dy, saved.second, saved.index, saved.geometry);
    if (ctx->needs_input_grad(1)) result[1] = ops::weight_grad(dy, saved.first, saved.index, saved.geometry, {});
    if (ctx->needs_input_grad(2)) result[2] = ops::bias_grad(dy);
    return result;
  }
};

// y = x Wᵀ + bias, with the values' gradient added to main_grad and returned to nobody.
struct LinearMainGrad : torch::autograd::Function<LinearMainGrad> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& values, const std::optional<Tensor>& bias,
                        const Tensor& main_grad, const Tensor& index, at::IntArrayRef geometry) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    save(ctx, x, values, index, geometry);
    // Not as a saved variable: those must not change until the backward, and this one changes in every backward.
    ctx->saved_data["main_grad"] = main_grad;
    return ops::linear_main_grad(x, values, bias, main_grad, index, geometry, "none");
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& dy = grads[0];
    variable_list result(6);
    if (!dy.defined()) return result;
    // What is added to main_grad has left the graph, so a derivative of this backward would lack it.
    TORCH_CHECK_VALUE(!at::GradMode::is_enabled(),
                      "create_graph must be False where main_grad accumulates the values' gradient: it has no "
                      "derivative, and is not part of the graph. Call accumulate_main_grad(False) for higher orders");
    const Saved saved(ctx);
    if (ctx->needs_input_grad(0)) result[0] = ops::input_grad(dy, saved.second, saved.index, saved.geometry);
    if (ctx->needs_input_grad(1)) {
      ops::weight_grad_accumulate_(ctx->saved_data["main_grad"].toTensor(), dy, saved.first, saved.index,
                                   saved.geometry);
    }
    if (ctx->needs_input_grad(2)) result[2] = ops::bias_grad(dy);
    return result;
  }
};

// dx = dy W
struct InputGrad : torch::autograd::Function<InputGrad> {
  static Tensor forward(AutogradContext* ctx, const Tensor& dy, const Tensor& values, const Tensor& index,
                        at::IntArrayRef geometry) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    save(ctx, dy, values, index, geometry);
    return ops::input_grad(dy, values, index, geometry);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& ddx = grads[0];
    variable_list result(4);
    if (!ddx.defined()) return result;
    const Saved saved(ctx);
    if (ctx->needs_input_grad(0)) {
      result[0] = ops::linear(ddx, saved.second, std::nullopt, saved.index, saved.geometry, "none");
    }
    if (ctx->needs_input_grad(1)) {
      result[1] = ops::weight_grad(saved.first, ddx, saved.index, saved.geometry, {});
    }
    return result;
  }
};

// dW = dyᵀ x on the support
struct WeightGrad : torch::autograd::Function<WeightGrad> {
  static Tensor forward(AutogradContext* ctx, const Tensor& dy, const Tensor& x, const Tensor& index,
                        at::IntArrayRef geometry, std::optional<at::ScalarType> out_dtype) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    save(ctx, dy, x, index, geometry);
    ctx->saved_data["dtype"] = dy.scalar_type();
    return ops::weight_grad(dy, x, index, geometry, out_dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(5);
    if (!grads[0].defined()) return result;
    const Tensor ddw = grads[0].to(ctx->saved_data["dtype"].toScalarType());
    const Saved saved(ctx);
    if (ctx->needs_input_grad(0)) {
      result[0] = ops::linear(saved.second, ddw, std::nullopt, saved.index, saved.geometry, "none");
    }
    if (ctx->needs_input_grad(1)) result[1] = ops::input_grad(saved.first, ddw, saved.index, saved.geometry);
    return result;
  }
};

// db = sum of dy over tokens
struct BiasGrad : torch::autograd::Function<BiasGrad> {
  static Tensor forward(AutogradContext* ctx, const Tensor& dy) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    ctx->saved_data["sizes"] = dy.sym_sizes().vec();
    return ops::bias_grad(dy);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(1);
    return {grads[0].expand_symint(ctx->saved_data["sizes"].toSymIntVector())};
  }
};

Tensor activate(const Tensor& pre, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return pre;
    case Activation::kRelu:
      return at::relu(pre);
    case Activation::kGelu:
      return at::gelu(pre);
    case Activation::kGeluTanh:
      return at::gelu(pre, "tanh");
    case Activation::kSilu:
      return at::silu(pre);
  }
  return pre;
}

// With a graph the activation is PyTorch's own, which keeps what its derivative needs; without one it is fused.
Tensor linear(const Tensor& x, const Tensor& values, const std::optional<Tensor>& bias, const Tensor& index,
              at::IntArrayRef geometry, c10::string_view activation) {
  if (needs_graph({&x, &values, bias ? &*bias : &x})) {
    return activate(Linear::apply(x, values, bias, index, geometry), ops::parse_activation(activation));
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return ops::linear(x, values, bias, index, geometry, activation);
}

Tensor input_grad(const Tensor& dy, const Tensor& values, const Tensor& index, at::IntArrayRef geometry) {
  if (needs_graph({&dy, &values})) return InputGrad::apply(dy, values, index, geometry);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return ops::input_grad(dy, values, index, geometry);
}

// Frozen values have no gradient to add, so their graph is that of linear, of any order.
Tensor linear_main_grad(const Tensor& x, const Tensor& values, const std::optional<Tensor>& bias,
                        const Tensor& main_grad, const Tensor& index, at::IntArrayRef geometry,
                        c10::string_view activation) {
  TORCH_CHECK_VALUE(!main_grad.requires_grad(), "main_grad must not require a gradient");
  if (!needs_graph({&x, &values, bias ? &*bias : &x})) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return ops::linear_main_grad(x, values, bias, main_grad, index, geometry, activation);
  }
  if (!values.requires_grad()) return linear(x, values, bias, index, geometry, activation);
  return activate(LinearMainGrad::apply(x, values, bias, main_grad, index, geometry),
                  ops::parse_activation(activation));
}

Tensor weight_grad(const Tensor& dy, const Tensor& x, const Tensor& index, at::IntArrayRef geometry,
                   std::optional<at::ScalarType> out_dtype) {
  if (needs_graph({&dy, &x})) return WeightGrad::apply(dy, x, index, geometry, out_dtype);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return ops::weight_grad(dy, x, index, geometry, out_dtype);
}

void weight_grad_accumulate_(const Tensor& out, const Tensor& dy, const Tensor& x, const Tensor& index,
                             at::IntArrayRef geometry) {
  TORCH_CHECK_VALUE(!needs_graph({&out, &dy, &x}),
                    "weight_grad_accumulate_ has no derivative: its operands must not require a gradient");
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ops::weight_grad_accumulate_(out, dy, x, index, geometry);
  }
  if (!out.is_inference()) torch::autograd::impl::bump_version(out);
}

Tensor bias_grad(const Tensor& dy) {
  if (needs_graph({&dy})) return BiasGrad::apply(dy);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return ops::bias_grad(dy);
}

}  // namespace

TORCH_LIBRARY_IMPL(pytorch_block_sparse, Autograd, m) {
  m.impl("linear", linear);
  m.impl("input_grad", input_grad);
  m.impl("linear_main_grad", linear_main_grad);
  m.impl("weight_grad", weight_grad);
  m.impl("weight_grad_accumulate_", weight_grad_accumulate_);
  m.impl("bias_grad", bias_grad);
}

}  // namespace block_sparse
