"""Argument checks shared by the package: each error names the argument, the rule and the value found."""

from __future__ import annotations

import numbers
import operator

import torch
from torch import Tensor

from .errors import BlockSparseError

INT32_MAX = 2**31 - 1


def check_int(name: str, value: object, low: int, high: int = INT32_MAX) -> int:
    """``value`` as an int from ``low`` to ``high``, or an error that names the argument."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        bound = f">= {low} that fits int32" if high == INT32_MAX else f"from {low} to {high}"
        raise BlockSparseError(f"{name} must be an integer {bound}, got {value!r}")
    return number


def check_pair(name: str, value: object) -> tuple[int, int]:
    """``value`` as two positive ints that fit int32, or an error that names the argument."""
    try:
        first, second = value  # type: ignore[misc]
    except (TypeError, ValueError):
        raise BlockSparseError(f"{name} must be a pair of positive integers, got {value!r}") from None
    return check_int(f"{name}[0]", first, 1), check_int(f"{name}[1]", second, 1)


def _as_tensor(name: str, value: object) -> Tensor:
    try:
        return value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BlockSparseError(f"{name} must be a tensor or nested lists of one shape: {error}") from None


def check_integers(name: str, value: object, dim: int) -> Tensor:
    """``value`` as an int64 tensor of ``dim`` dimensions on the CPU."""
    tensor = _as_tensor(name, value)
    integers = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    # An empty list becomes a float tensor, which is no error.
    if tensor.dim() != dim or (tensor.numel() and not integers):
        raise BlockSparseError(
            f"{name} must be an integer tensor of {dim} dimensions, got {tensor.dtype} {list(tensor.shape)}"
        )
    if tensor.is_meta:
        raise BlockSparseError(f"{name} must hold data, got a meta tensor")
    return tensor.detach().to("cpu", torch.int64)


def check_mask(name: str, value: object) -> Tensor:
    """``value`` as a bool grid on the CPU."""
    tensor = _as_tensor(name, value)
    if tensor.dtype != torch.bool or tensor.dim() != 2 or tensor.is_meta:
        raise BlockSparseError(
            f"{name} must be a bool grid of 2 dimensions, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    return tensor.detach().cpu()


def check_share(name: str, value: object) -> None:
    """Raises :class:`BlockSparseError` unless ``value`` is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value <= 1:
        raise BlockSparseError(f"{name} must be a number in (0, 1], got {value!r}")
