"""The dense float64 twin of every operator in :mod:`ops`: slow, obvious, and what tests measure the kernels against.

Operands may have any floating dtype and device; every function computes in float64 through the dense matrix W (O, I).
What an edge block holds past O or I never reaches a result, a NaN included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .pattern import BlockPattern

ACTIVATION_FUNCTIONS = {
    None: lambda pre: pre,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda pre: functional.gelu(pre, approximate="tanh"),
    "silu": functional.silu,
}


def _coordinates(pattern: BlockPattern, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, cols = pattern.block_coords.to(device).long().unbind(1)
    return rows, cols


def dense_weight(values: Tensor, pattern: BlockPattern) -> Tensor:
    """values [nnz, bh, bw] -> W [O, I] in float64, zero where no block is stored."""
    (rows, cols), (height, width) = pattern.grid_shape, pattern.block_shape
    padded = values.new_zeros((rows * height, cols * width), dtype=torch.float64)  # [R bh, C bw]
    grid = padded.view(rows, height, cols, width).transpose(1, 2)  # [R, C, bh, bw], a view of it
    grid[_coordinates(pattern, values.device)] = values.double()
    return padded[: pattern.shape[0], : pattern.shape[1]]


def stored_blocks(dense: Tensor, pattern: BlockPattern) -> Tensor:
    """[O, I] -> its blocks on the support [nnz, bh, bw], in the same dtype and zero past O or I."""
    (rows, cols), (height, width) = pattern.grid_shape, pattern.block_shape
    padded = dense.new_zeros((rows * height, cols * width))
    padded[: pattern.shape[0], : pattern.shape[1]] = dense
    return padded.view(rows, height, cols, width).transpose(1, 2)[_coordinates(pattern, dense.device)]


def linear(
    x: Tensor, values: Tensor, pattern: BlockPattern, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """activation(x Wᵀ + bias): x [..., I], values [nnz, bh, bw], bias [O] -> float64 [..., O]."""
    pre = x.double() @ dense_weight(values, pattern).t()
    return ACTIVATION_FUNCTIONS[activation](pre if bias is None else pre + bias.double())


def input_grad(dy: Tensor, values: Tensor, pattern: BlockPattern) -> Tensor:
    """dy W: dy [..., O], values [nnz, bh, bw] -> float64 [..., I]."""
    return dy.double() @ dense_weight(values, pattern)


def weight_grad(dy: Tensor, x: Tensor, pattern: BlockPattern) -> Tensor:
    """dyᵀ x on the support: dy [..., O], x [..., I] -> float64 [nnz, bh, bw], zero past O or I."""
    rows, cols = pattern.shape
    return stored_blocks(dy.double().reshape(-1, rows).t() @ x.double().reshape(-1, cols), pattern)


def bias_grad(dy: Tensor) -> Tensor:
    """Sum over tokens: dy [..., O] -> float64 [O]."""
    return dy.double().reshape(-1, dy.shape[-1]).sum(0)
