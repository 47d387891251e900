"""The operators: typed wrappers, fake kernels, documentation. Native schemas: ``native/block_sparse_native.cpp``.

With x (T, I), W (O, I) on the support of a :class:`BlockPattern`, y (T, O)::

    linear       y  = activation(x Wᵀ + bias)
    input_grad   dx = dy W
    weight_grad  dW = (dyᵀ x) on the support
    bias_grad    db = sum of dy over tokens

T is the product of the leading dimensions, which may be any. Every operator is differentiable to any order; each
one's derivative is another of them. Under autocast, operands take the autocast dtype. For gradients that are summed
over many backward passes, :func:`weight_grad_accumulate_` adds dW to a tensor, and so does the backward of
:func:`linear` with ``main_grad``; neither has a derivative of its own.

All raise :class:`BlockSparseError` where an operand's shape, dtype or device does not fit; then nothing has run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import BlockSparseError
from .native import block_sparse_native  # also registers torch.ops.pytorch_block_sparse
from .pattern import BlockPattern

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")

_native = torch.ops.pytorch_block_sparse
_linear, _input_grad, _weight_grad = _native.linear.default, _native.input_grad.default, _native.weight_grad.default
_bias_grad = _native.bias_grad.default
_linear_main_grad, _weight_grad_accumulate = (
    _native.linear_main_grad.default,
    _native.weight_grad_accumulate_.default,
)


def check_activation(activation: str | None) -> None:
    """Raises :class:`BlockSparseError` unless ``activation`` is None or one of ``ACTIVATIONS``."""
    if activation is not None and activation not in ACTIVATIONS:
        raise BlockSparseError(f"activation must be None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def _call(operator: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Runs a native operator, with its ValueError as the package's own error."""
    if torch.compiler.is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except BlockSparseError:
        raise
    except ValueError as error:
        raise BlockSparseError(str(error)) from None


def linear(
    x: Tensor,
    values: Tensor,
    pattern: BlockPattern,
    bias: Tensor | None = None,
    activation: str | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """activation(x Wᵀ + bias).

    Args:
        x: [..., I].
        values: [nnz, bh, bw], the block of each slot of ``pattern``.
        pattern: the support of W (O, I).
        bias: [O].
        activation: None, or "relu", "gelu", "gelu_tanh" or "silu", applied in the accumulation dtype where no gradient
            is recorded.
        main_grad: [nnz, bh, bw], contiguous, in the dtype of the operands, or float32 where that has 16 bits. The
            backward adds the gradient of ``values`` to it, summed in float32, and returns none for ``values``;
            it cannot be differentiated again (``create_graph=True`` is an error).

    Returns:
        [..., O], contiguous.
    """
    check_activation(activation)
    if main_grad is not None:
        index = pattern.index(values.device)
        return _call(_linear_main_grad, x, values, bias, main_grad, index, pattern.geometry, activation or "none")
    return _call(_linear, x, values, bias, pattern.index(values.device), pattern.geometry, activation or "none")


def input_grad(dy: Tensor, values: Tensor, pattern: BlockPattern) -> Tensor:
    """dy W: [..., O] and values [nnz, bh, bw] -> [..., I]."""
    return _call(_input_grad, dy, values, pattern.index(values.device), pattern.geometry)


def weight_grad(dy: Tensor, x: Tensor, pattern: BlockPattern, out_dtype: torch.dtype | None = None) -> Tensor:
    """dyᵀ x on the support: [..., O] and [..., I] -> [nnz, bh, bw], zero past the edges of W.

    ``out_dtype``: that of the operands if not given; or float32 where theirs has 16 bits, which rounds nothing.
    """
    return _call(_weight_grad, dy, x, pattern.index(dy.device), pattern.geometry, out_dtype)


def weight_grad_accumulate_(out: Tensor, dy: Tensor, x: Tensor, pattern: BlockPattern) -> Tensor:
    """out += dyᵀ x on the support, in one pass: dW by itself never exists.

    Args:
        out: [nnz, bh, bw], contiguous, in the dtype of the operands, or float32 where that has 16 bits. What it holds
            past the edges of W stays.
        dy: [..., O].
        x: [..., I].
        pattern: the support of W (O, I).

    Returns:
        ``out``.
    """
    _call(_weight_grad_accumulate, out, dy, x, pattern.index(dy.device), pattern.geometry)
    return out


def bias_grad(dy: Tensor) -> Tensor:
    """Sum over tokens: [..., O] -> [O]."""
    return _call(_bias_grad, dy)


def _check_one_device(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    """What the native checks would say of devices: with an operand on "meta" the fake kernels run in their place."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise BlockSparseError(
                f"{name} must be on the device of {first_name} ({first.device}), got {tensor.device}"
            )


@torch.library.register_fake("pytorch_block_sparse::linear")
def _(x, values, bias, index, geometry, activation="none"):
    _check_one_device("x", x, values=values, bias=bias, index=index)
    return x.new_empty((*x.shape[:-1], geometry[0]))


@torch.library.register_fake("pytorch_block_sparse::input_grad")
def _(dy, values, index, geometry):
    _check_one_device("dy", dy, values=values, index=index)
    return dy.new_empty((*dy.shape[:-1], geometry[1]))


@torch.library.register_fake("pytorch_block_sparse::linear_main_grad")
def _(x, values, bias, main_grad, index, geometry, activation="none"):
    _check_one_device("x", x, values=values, bias=bias, main_grad=main_grad, index=index)
    return x.new_empty((*x.shape[:-1], geometry[0]))


@torch.library.register_fake("pytorch_block_sparse::weight_grad")
def _(dy, x, index, geometry, out_dtype=None):
    _check_one_device("dy", dy, x=x, index=index)
    return dy.new_empty((geometry[4], geometry[2], geometry[3]), dtype=out_dtype)


@torch.library.register_fake("pytorch_block_sparse::weight_grad_accumulate_")
def _(out, dy, x, index, geometry):
    _check_one_device("dy", dy, out=out, x=x, index=index)


@torch.library.register_fake("pytorch_block_sparse::work_lists")
def _(index, geometry):
    return index.new_empty(block_sparse_native.work_lists_size(geometry))


@torch.library.register_fake("pytorch_block_sparse::bias_grad")
def _(dy):
    return dy.new_empty(dy.shape[-1:])
