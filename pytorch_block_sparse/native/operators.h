// The operators as C++ calls that go through PyTorch's dispatcher. Schemas: block_sparse_native.cpp.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/string_view.h>

#include "problem.h"

namespace block_sparse::ops {

// `index` is the pattern's packed index, `geometry` is [O, I, bh, bw, nnz] (packed_index.h, problem.h).

// x [..., I], values [nnz, bh, bw], bias [O] -> activation(x Wᵀ + bias) [..., O]
at::Tensor linear(const at::Tensor& x, const at::Tensor& values, const std::optional<at::Tensor>& bias,
                  const at::Tensor& index, at::IntArrayRef geometry, c10::string_view activation);

// dy [..., O], values [nnz, bh, bw] -> dy W [..., I]
at::Tensor input_grad(const at::Tensor& dy, const at::Tensor& values, const at::Tensor& index,
                      at::IntArrayRef geometry);

// dy [..., O], x [..., I] -> dyᵀ x on the support [nnz, bh, bw], in the operands' dtype unless `out_dtype` says float32
at::Tensor weight_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& index, at::IntArrayRef geometry,
                       std::optional<at::ScalarType> out_dtype);

// out [nnz, bh, bw] += dyᵀ x on the support
void weight_grad_accumulate_(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& index,
                             at::IntArrayRef geometry);

// As linear; its backward adds the values' gradient to main_grad [nnz, bh, bw].
at::Tensor linear_main_grad(const at::Tensor& x, const at::Tensor& values, const std::optional<at::Tensor>& bias,
                            const at::Tensor& main_grad, const at::Tensor& index, at::IntArrayRef geometry,
                            c10::string_view activation);

// dy [..., O] -> sum over tokens [O]
at::Tensor bias_grad(const at::Tensor& dy);

// "none", "relu", "gelu", "gelu_tanh" or "silu"; any other name is an error.
Activation parse_activation(c10::string_view name);

}  // namespace block_sparse::ops
