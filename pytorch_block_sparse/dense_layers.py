"""The dense layers that can become block sparse: ``nn.Linear`` and transformers' ``Conv1D``."""

from __future__ import annotations

from torch import Tensor, nn


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, a linear layer with a transposed weight [I, O]; without importing it."""
    return any(
        base.__name__ == "Conv1D" and base.__module__.partition(".")[0] == "transformers"
        for base in type(module).__mro__
    )


def dense_weight(module: nn.Module | None) -> Tensor | None:
    """The weight of a dense linear layer as [O, I] (a view), or None if the module is none."""
    if module is not None and is_conv1d(module):
        return module.weight.detach().t()
    return module.weight.detach() if isinstance(module, nn.Linear) else None
