"""The growth signal: block norms of the full weight gradient, from what passes through a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..block_sparse_linear import BlockSparseLinear
from ..blocks import to_grid
from ..pattern import BlockPattern
from ..reference import ACTIVATION_FUNCTIONS

# Elements of the dense gradient that exist at a time: 16 MB in float32.
CHUNK_ELEMENTS = 2**22


class GradientTap:
    """A forward hook that remembers a layer's input and its output's gradient, where somebody wants them.

    The full gradient dyᵀ x needs nothing else, and is never stored. Backward passes add up until :meth:`clear`, or
    until the values' gradient (``main_grad`` where that is on) has been dropped or zeroed: accumulated gradients count,
    those of a skipped step do not.

    Args:
        layer: the layer to register it with.
        wanted: asked at each forward pass.
    """

    def __init__(self, layer: BlockSparseLinear, wanted: Callable[[], bool]) -> None:
        self._layer = layer
        self._wanted = wanted
        self.records: list[tuple[Tensor, Tensor]] = []  # (x [T, I], gradient before the activation [T, O])

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> None:
        # What a compiled graph computes cannot be tapped; a shallow copy of the layer shares its hooks.
        if torch.compiler.is_compiling() or module is not self._layer or not output.requires_grad:
            return
        if not self._wanted():
            return
        accumulated = self._layer.values.grad if self._layer.main_grad is None else self._layer.main_grad
        if accumulated is None or not accumulated.any():
            self.clear()
        x = args[0] if args else kwargs["x"]
        output.register_hook(partial(self._record, x.detach()))

    def _record(self, x: Tensor, dy: Tensor) -> None:
        layer, dy = self._layer, dy.detach()
        if layer.activation is not None:
            # The layer keeps no value from before its activation; at the few steps that want it, compute it again.
            bias = None if layer.bias is None else layer.bias.detach()
            before = ops.linear(x.to(layer.values.dtype), layer.values.detach(), layer.pattern, bias)
            with torch.enable_grad():
                before.requires_grad_()
                after = ACTIVATION_FUNCTIONS[layer.activation](before)
            (dy,) = torch.autograd.grad(after, before, dy.to(after.dtype))
        self.records.append((x.reshape(-1, layer.in_features), dy.reshape(-1, layer.out_features)))

    def clear(self) -> None:
        """Forgets everything."""
        self.records.clear()

    def __reduce__(self) -> tuple:
        # A copied or pickled layer is nobody's to train: its hook does nothing.
        return _idle_hook, ()


def _idle_hook() -> Callable:
    return _ignore


def _ignore(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> None:
    """The hook of a copy."""


def gradient_block_norms(
    records: list[tuple[Tensor, Tensor]],
    pattern: BlockPattern,
    device: torch.device | str = "cpu",
    reduce: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Euclidean norm of every block of the full weight gradient, the sum of dyᵀ x over ``records``.

    A few block rows are computed at a time, so that the dense gradient never exists.

    Args:
        records: pairs (x [T, I], dy [T, O]).
        pattern: of the layer; only its shapes count.
        device: of the records.
        reduce: adds up a piece of the gradient over replicas, in place.

    Returns:
        [R, C] on the CPU, float64 if the records are, else float32.
    """
    (out_features, in_features), (height, _) = pattern.shape, pattern.block_shape
    double = any(tensor.dtype == torch.float64 for record in records for tensor in record)
    dtype = torch.float64 if double else torch.float32
    operands = [(x.to(dtype), dy.to(dtype)) for x, dy in records]
    rows = max(1, CHUNK_ELEMENTS // (height * in_features)) * height
    norms = []
    for begin in range(0, out_features, rows):
        end = min(begin + rows, out_features)
        gradient = torch.zeros((end - begin, in_features), device=device, dtype=dtype)
        for x, dy in operands:
            gradient.addmm_(dy[:, begin:end].t(), x)
        if reduce is not None:
            reduce(gradient)
        norms.append(torch.linalg.vector_norm(to_grid(gradient, pattern.block_shape), dim=(2, 3)))
    return torch.cat(norms).cpu()
