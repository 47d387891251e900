"""What an optimizer remembers of each block, of any optimizer: found, reset and resized by slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import BlockSparseError


def check_optimizer(optimizer: object) -> None:
    """Raises :class:`BlockSparseError` unless ``optimizer`` keeps its state by parameter, as all but LBFGS do."""
    if not isinstance(optimizer, Optimizer):
        raise BlockSparseError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BlockSparseError("optimizer must keep state for each parameter, got LBFGS: its history joins them all")


def holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether ``optimizer`` trains ``parameter``."""
    return _group_of(optimizer, parameter) is not None


def reset_slots(optimizer: Optimizer, values: Tensor, slots: Tensor) -> None:
    """Makes the state of some blocks that of a block never trained.

    Args:
        optimizer: any optimizer; one that has no state of ``values`` is left as it is.
        values: the parameter [nnz, bh, bw].
        slots: int64 [n].
    """
    for state, key, initial in _slot_states(optimizer, values, values.shape):
        state[key][slots] = initial


def resize_slots(optimizer: Optimizer, values: Tensor, shape: torch.Size, kept: Tensor) -> None:
    """Gives kept blocks their state in a parameter that has been resized, and new ones that of a block never trained.

    Args:
        optimizer: as in :func:`reset_slots`.
        values: the parameter as it is now, [new nnz, bh, bw]; kept blocks come first.
        shape: what its shape was.
        kept: int64 [k], former slots of the kept blocks.
    """
    for state, key, initial in _slot_states(optimizer, values, shape):
        before = state[key]
        after = before.new_full((values.shape[0], *before.shape[1:]), initial)
        after[: kept.numel()] = before[kept]
        state[key] = after


def _group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any] | None:
    for group in optimizer.param_groups:
        if any(other is parameter for other in group["params"]):
            return group
    return None


def _slot_states(optimizer: Optimizer, values: Tensor, shape: torch.Size) -> Iterator[tuple[dict, str, float]]:
    """(state, key, initial value) of each tensor that has entries for each block.

    Such a tensor has the parameter's shape, or 1 in place of a block's side, as Adafactor's row and column variances
    have. Everything else, as the count of steps, is of the whole parameter.
    """
    group = _group_of(optimizer, values)
    if group is None or values not in optimizer.state:
        return
    state = optimizer.state[values]
    for key, entry in state.items():
        if (
            isinstance(entry, Tensor)
            and entry.dim() == len(shape)
            and entry.shape[0] == shape[0]
            and all(side in (1, full) for side, full in zip(entry.shape[1:], shape[1:], strict=True))
        ):
            yield state, key, _initial_value(optimizer, group, key)


def _initial_value(optimizer: Optimizer, group: dict[str, Any], key: str) -> float:
    """What the optimizer itself begins with: zero, but for Adagrad's sum and Rprop's step size."""
    if isinstance(optimizer, torch.optim.Adagrad) and key == "sum":
        return float(group["initial_accumulator_value"])
    if isinstance(optimizer, torch.optim.Rprop) and key == "step_size":
        return float(group["lr"])
    return 0.0
