"""The tensor that gradients of ``values`` are accumulated in: its dtype, its checks, and what becomes of it."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import BlockSparseError


def new_main_grad(values: Tensor) -> Tensor:
    """Zeros like ``values`` [nnz, bh, bw], in float32; in float64 for float64."""
    return torch.zeros(values.shape, device=values.device, dtype=_default_dtype(values))


def check_main_grad(main_grad: object, values: Tensor) -> None:
    """Raises :class:`BlockSparseError` unless gradients of ``values`` can be added to ``main_grad``."""
    if not isinstance(main_grad, Tensor) or main_grad.requires_grad:
        raise BlockSparseError("main_grad must be a tensor that does not require a gradient")
    if main_grad.shape != values.shape:
        raise BlockSparseError(f"main_grad must be {tuple(values.shape)} as values, got {tuple(main_grad.shape)}")
    if main_grad.dtype not in (values.dtype, _default_dtype(values)):
        raise BlockSparseError(
            f"main_grad must be of dtype {_default_dtype(values)} or that of values ({values.dtype}), "
            f"got {main_grad.dtype}"
        )
    if main_grad.device != values.device:
        raise BlockSparseError(f"main_grad must be on the device of values ({values.device}), got {main_grad.device}")
    if not main_grad.is_contiguous():
        raise BlockSparseError(f"main_grad must be contiguous, got strides {main_grad.stride()}")


def fitted_main_grad(before: Tensor | None, values: Tensor) -> Tensor:
    """``before`` if it fits ``values``, itself where nothing else has to change; zeros where it has another shape."""
    if before is None or before.shape != values.shape or before.is_meta or values.is_meta:
        return new_main_grad(values)
    fits = before.dtype in (values.dtype, _default_dtype(values))
    return before.to(device=values.device, dtype=before.dtype if fits else _default_dtype(values))


def _default_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
