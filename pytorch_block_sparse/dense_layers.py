"""The dense layers that can become block sparse: ``nn.Linear`` and transformers' ``Conv1D``."""

from __future__ import annotations

from torch import Tensor, nn

from .errors import BlockSparseError


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


def as_linear(module: nn.Module) -> nn.Linear:
    """An ``nn.Linear`` that holds the parameters' data of a dense linear layer; of a Conv1D a transposed view.

    Raises:
        BlockSparseError: the module is neither ``nn.Linear`` nor transformers' Conv1D.
    """
    weight = dense_weight(module)
    if weight is None:
        raise BlockSparseError(f"module must be torch.nn.Linear or transformers' Conv1D, got {type(module).__name__}")
    if isinstance(module, nn.Linear):
        return module
    linear = nn.Linear(weight.shape[1], weight.shape[0], module.bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    if module.bias is not None:
        linear.bias = module.bias
    return linear.train(module.training)
