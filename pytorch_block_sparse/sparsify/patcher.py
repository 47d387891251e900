"""BlockSparseModelPatcher: the 2020 package's interface, a thin layer over :func:`sparsify`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from ..block_sparse_linear import BlockSparseLinear
from ..dense_layers import dense_weight
from ..errors import BlockSparseError
from .convert import sparsify
from .layers import module_places
from .report import SparsifyReport

_SETTINGS = {"density", "block_shape", "pseudo_linear"}


class PseudoBlockSparseLinear(nn.Module):
    """A dense layer that computes what a block-sparse one does, weight and gradient masked: for comparing the two.

    Args:
        block_sparse_linear: the layer to imitate; it is not changed.

    Attributes:
        weight: parameter [O, I].
        bias: parameter [O], or None.
        mask: buffer [O, I], 1 in stored blocks, else 0.
    """

    def __init__(self, block_sparse_linear: BlockSparseLinear) -> None:
        super().__init__()
        dense = block_sparse_linear.to_linear()
        self.weight, self.bias = dense.weight, dense.bias
        self.in_features, self.out_features = dense.in_features, dense.out_features
        height, width = block_sparse_linear.block_shape
        mask = block_sparse_linear.pattern.mask().repeat_interleave(height, 0).repeat_interleave(width, 1)
        self.register_buffer("mask", mask[: self.out_features, : self.in_features].to(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return linear(x, self.weight * self.mask, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, density={self.mask.mean():.4g}"


class BlockSparseModelPatcher:
    """Makes layers of a model block sparse, by name.

    As in 2020 a pattern is a regular expression that has to match the *beginning* of a module's name, and the first one
    added that does decides. :func:`sparsify` can do more.

    >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    >>> patcher = BlockSparseModelPatcher()
    >>> [layer["regexp"] for layer in patcher.get_patchable_layers(model)]
    ['0', '2']
    >>> patcher.add_pattern("2", {"density": 0.5})
    >>> patcher.patch_model(model).density
    0.5
    >>> model[2]
    BlockSparseLinear(in_features=128, out_features=64, bias=True, block_shape=(32, 32), nnz=4, density=0.5)
    """

    def __init__(self) -> None:
        self.patterns: list[dict[str, Any]] = []

    def get_patchable_layers(self, model: nn.Module) -> list[dict[str, Any]]:
        """The linear layers: for each its name as a regular expression ("regexp") and the module ("layer")."""
        return [
            {"regexp": re.escape(name), "layer": module}
            for name, module in model.named_modules()
            if dense_weight(module) is not None
        ]

    def add_pattern(self, pattern: str, pattern_info: Mapping[str, Any]) -> None:
        """Adds a pattern.

        Args:
            pattern: regular expression for the beginning of the names.
            pattern_info: "density", and optionally "block_shape" and "pseudo_linear" (True: a
                :class:`PseudoBlockSparseLinear`).

        Raises:
            BlockSparseError: either is malformed.
        """
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise BlockSparseError(f"pattern must be a regular expression, got {pattern!r}: {error}") from None
        if not isinstance(pattern_info, Mapping) or "density" not in pattern_info or set(pattern_info) - _SETTINGS:
            raise BlockSparseError(
                f"pattern_info must map 'density', and may map 'block_shape' and 'pseudo_linear', got {pattern_info!r}"
            )
        self.patterns.append({"pattern": pattern, "pattern_info": dict(pattern_info)})

    def pattern_match(self, module_name: str) -> tuple[bool, Any]:
        """(True, pattern_info) of the first pattern that fits, else (False, -1)."""
        for entry in self.patterns:
            if re.match(entry["pattern"], module_name):
                return True, entry["pattern_info"]
        return False, -1

    def patch_model(self, model: nn.Module) -> SparsifyReport:
        """Replaces the layers that a pattern fits, in place.

        Raises:
            BlockSparseError: a pattern fits no linear layer, or one that cannot be converted. Nothing is changed then.
        """
        linears = {id(layer["layer"]) for layer in self.get_patchable_layers(model)}
        names = [name for name, module in model.named_modules() if id(module) in linears]
        for entry in self.patterns:
            if not any(re.match(entry["pattern"], name) for name in names):
                raise BlockSparseError(f"pattern must match a linear layer's name, got {entry['pattern']!r}")
        infos = {name: info for name in names for found, info in [self.pattern_match(name)] if found}
        rules = [
            (re.escape(name), {key: info[key] for key in ("density", "block_shape") if key in info})
            for name, info in infos.items()
        ]
        report = sparsify(model, rules=rules, include=[])
        places = module_places(model)
        for name, info in infos.items():
            if info.get("pseudo_linear"):
                layer = model.get_submodule(name)
                pseudo = PseudoBlockSparseLinear(layer).train(layer.training)
                for parent, attribute in places[layer]:
                    setattr(parent, attribute, pseudo)
        return report


__all__ = ["BlockSparseModelPatcher", "PseudoBlockSparseLinear"]
