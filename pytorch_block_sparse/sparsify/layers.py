"""Which layers of a model become sparse: selection by name, type or predicate, and where they hang in the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..checks import check_pair
from ..dense_layers import dense_weight
from ..errors import BlockSparseError
from ..pattern import block_grid, blocks_at_density

Selector = str | type | Callable[[str, nn.Module], bool]
Place = tuple[nn.Module, str]  # (parent, attribute)

_SETTINGS = ("density", "block_shape", "activation")


@dataclass(frozen=True)
class TargetLayer:
    """A dense layer that is to become sparse.

    Attributes:
        name: of the module in the model.
        module: ``nn.Linear`` or transformers' ``Conv1D``.
        places: every (parent, attribute) that holds the module.
        density: asked for, in (0, 1].
        block_shape: (bh, bw).
        activation: of the new layer, or None.
        pinned: whether a rule names this layer's density, so that no allocation changes it.
        activation_pinned: whether a rule names its activation.
        activation_name: the attribute of the parent whose module the new layer's activation replaces, or None.
    """

    name: str
    module: nn.Module
    places: tuple[Place, ...]
    density: float
    block_shape: tuple[int, int]
    activation: str | None = None
    pinned: bool = False
    activation_pinned: bool = False
    activation_name: str | None = None

    @property
    def weight(self) -> Tensor:
        """The dense weight [O, I], a view."""
        return dense_weight(self.module)

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        weight = self.weight
        return weight.shape[0], weight.shape[1]

    @property
    def grid_shape(self) -> tuple[int, int]:
        """(R, C), the grid of blocks."""
        return block_grid(self.shape, self.block_shape)

    @property
    def cells(self) -> int:
        """Blocks of the grid."""
        return self.grid_shape[0] * self.grid_shape[1]


def module_places(model: nn.Module) -> dict[nn.Module, list[Place]]:
    """Every (parent, attribute) that holds each module: a shared module has several."""
    places: dict[nn.Module, list[Place]] = {}
    for parent in model.modules():
        for attribute, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, attribute))
    return places


def matches(selector: Selector, name: str, module: nn.Module) -> bool:
    """Whether a regular expression (full match of the name), a type or a predicate selects the module."""
    if isinstance(selector, str):
        return re.fullmatch(selector, name) is not None
    if isinstance(selector, type):
        return isinstance(module, selector)
    return bool(selector(name, module))


def select_layers(
    model: nn.Module,
    density: float,
    block_shape: tuple[int, int],
    rules: Mapping[Any, Any] | Sequence[tuple[Any, Any]] | None,
    include: Selector | Sequence[Selector] | None,
    exclude: Selector | Sequence[Selector] | None,
) -> tuple[list[TargetLayer], dict[str, str]]:
    """The layers to convert, in the model's order, and those left dense with the reason.

    Args:
        model: it is only read.
        density: where no rule says otherwise.
        block_shape: where no rule says otherwise.
        rules: selector -> density, None (leave dense), or a mapping with any of "density", "block_shape", "activation".
            The first that selects a layer holds.
        include: only what one of these selects, or a rule. Everything if not given.
        exclude: nothing that one of these selects.

    Raises:
        BlockSparseError: an argument is malformed, a selector names nothing, or names what cannot be converted.
    """
    if not isinstance(model, nn.Module):
        raise BlockSparseError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    blocks_at_density(density, 1)
    block_shape = check_pair("block_shape", block_shape)
    parsed = [(_check_selector("rules", selector), _check_rule(rule)) for selector, rule in _pairs(rules)]
    included, excluded = _selectors("include", include), _selectors("exclude", exclude)
    places, owners = module_places(model), _weight_owners(model)
    targets: list[TargetLayer] = []
    skipped: dict[str, str] = {}
    linears = {name: m for name, m in model.named_modules() if dense_weight(m) is not None}
    for argument, selectors in (("rules", [s for s, _ in parsed]), ("include", included or []), ("exclude", excluded)):
        for selector in selectors:
            if isinstance(selector, str) and not any(re.fullmatch(selector, name) for name in linears):
                raise BlockSparseError(f"{argument} must match a linear layer's whole name, got {selector!r}")
    for name, module in linears.items():
        if any(matches(selector, name, module) for selector in excluded):
            skipped[name] = "excluded"
            continue
        ruled_by, rule = next(((s, rule) for s, rule in parsed if matches(s, name, module)), (None, {}))
        included_by = next((s for s in included or () if matches(s, name, module)), None)
        if rule is None or (included is not None and included_by is None and ruled_by is None):
            skipped[name] = "a rule leaves it dense" if rule is None else "not included"
            continue
        reason = _unfit(module, places.get(module, []), owners)
        if reason is not None:
            # Nobody who names a layer wants to find it dense afterwards; who takes everything takes what can be had.
            if isinstance(included_by, str) or isinstance(ruled_by, str):
                raise BlockSparseError(f"include and rules must name layers that can be converted; {name} {reason}")
            skipped[name] = reason
            continue
        target = TargetLayer(
            name,
            module,
            tuple(places[module]),
            density=rule.get("density", density),
            block_shape=rule.get("block_shape", block_shape),
            activation=rule.get("activation"),
            pinned="density" in rule,
            activation_pinned="activation" in rule,
        )
        targets.append(target)
    if not targets:
        raise BlockSparseError(f"model must hold a linear layer to convert; those found stay dense: {skipped}")
    return targets, skipped


def _pairs(rules: Mapping[Any, Any] | Sequence[tuple[Any, Any]] | None) -> Iterable[tuple[Any, Any]]:
    if rules is None:
        return []
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise BlockSparseError(f"rules must be a mapping or pairs of (selector, setting), got {rules!r}")
    return pairs


def _check_rule(rule: Any) -> dict[str, Any] | None:
    if rule is None:
        return None
    settings = dict(rule) if isinstance(rule, Mapping) else {"density": rule}
    unknown = set(settings) - set(_SETTINGS)
    if unknown or not settings:
        raise BlockSparseError(f"rules must set some of {', '.join(_SETTINGS)}, got {rule!r}")
    if "density" in settings:
        blocks_at_density(settings["density"], 1)
    if "block_shape" in settings:
        settings["block_shape"] = check_pair("block_shape", settings["block_shape"])
    ops.check_activation(settings.get("activation"))
    return settings


def _check_selector(argument: str, selector: Any) -> Selector:
    if isinstance(selector, str):
        try:
            re.compile(selector)
        except re.error as error:
            raise BlockSparseError(
                f"{argument} must hold valid regular expressions, got {selector!r}: {error}"
            ) from None
    elif not callable(selector):
        raise BlockSparseError(
            f"{argument} must hold regular expressions, types or predicates (name, module), got {selector!r}"
        )
    return selector


def _selectors(argument: str, selectors: Any) -> list[Selector] | None:
    if selectors is None:
        return None if argument == "include" else []
    if isinstance(selectors, str) or callable(selectors):
        selectors = [selectors]
    try:
        selectors = list(selectors)
    except TypeError:
        raise BlockSparseError(f"{argument} must be a selector or a sequence of them, got {selectors!r}") from None
    return [_check_selector(argument, selector) for selector in selectors]


def _weight_owners(model: nn.Module) -> dict[int, list[str]]:
    """Names of the modules that hold each parameter, by the parameter's id."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return owners


def _unfit(module: nn.Module, places: list[Place], owners: dict[int, list[str]]) -> str | None:
    """Why this layer has to stay dense, or None."""
    if not places:
        return "is the model itself, which nothing holds: see BlockSparseLinear.from_linear"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "is parametrized: remove the parametrization first"
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return f"is a {type(module).__name__} with a forward of its own"
    if any(isinstance(parent, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for parent, _ in places):
        return "belongs to a torch module whose fused path reads its weight"
    if any(len(owners[id(parameter)]) > 1 for parameter in module._parameters.values() if parameter is not None):
        shared = sorted({n for p in module._parameters.values() if p is not None for n in owners[id(p)]})
        return f"shares a parameter with another module ({', '.join(shared)}): a sparse layer would untie them"
    if module.weight.is_meta:
        return "is on the meta device: it holds no weights to choose from"
    if module.weight.dtype not in ops.DTYPES:
        return f"has dtype {module.weight.dtype}, not float64, float32, bfloat16 or float16"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "has hooks, which a new layer would lose"
    return None


__all__ = ["Selector", "TargetLayer", "matches", "module_places", "select_layers"]
