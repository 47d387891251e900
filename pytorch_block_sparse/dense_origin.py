"""DenseOrigin: what a BlockSparseLinear stands for in its model, and so what densify() puts back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

# By type, exactly: a subclass may compute anything. transformers' are named, so that it need not be imported.
_ACTIVATIONS = {nn.ReLU: "relu", nn.SiLU: "silu"}
_ACTIVATIONS_OF_TRANSFORMERS = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
}


@dataclass(frozen=True)
class DenseOrigin:
    """What a sparse layer replaces.

    Attributes:
        layer_type: of the dense layer: ``nn.Linear``, or transformers' ``Conv1D``.
        activation_name: the attribute of the parent module where an ``nn.Identity`` is now, because the layer computes
            the activation that was there; None if it replaces none.
        activation_module: what was there.
    """

    layer_type: type[nn.Module] = nn.Linear
    activation_name: str | None = None
    activation_module: nn.Module | None = None


def activation_of(module: nn.Module | None) -> str | None:
    """The ``activation`` of :class:`BlockSparseLinear` that is the module's function, or None if none is.

    >>> activation_of(nn.GELU(approximate="tanh")), activation_of(nn.Tanh())
    ('gelu_tanh', None)
    """
    if module is None or "forward" in vars(module):
        return None
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    if type(module).__module__ == "transformers.activations":
        return _ACTIVATIONS_OF_TRANSFORMERS.get(type(module).__name__)
    return _ACTIVATIONS.get(type(module))
