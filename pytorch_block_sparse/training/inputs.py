"""What SparseOptimizer takes: the method, the layers to train and their schedules, checked."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..block_sparse_linear import BlockSparseLinear
from ..checks import check_int
from ..errors import BlockSparseError
from .schedules import ConstantDensity, DensitySchedule

DROP_SIGNALS = ("magnitude", "movement")
GROW_SIGNALS = (None, "random", "gradient")


def check_method(method: object) -> None:
    """Raises :class:`BlockSparseError` unless ``method`` has what a :class:`Method` has."""
    drop, grow = (getattr(method, name, "nothing") for name in ("drop_signal", "grow_signal"))
    if drop not in DROP_SIGNALS or grow not in GROW_SIGNALS or not hasattr(method, "fraction_at"):
        raise BlockSparseError(
            "method must be SET, RigL, MagnitudePruning, MovementPruning or an object with their members, "
            f"got {method!r}"
        )
    check_int("method.interval", getattr(method, "interval", None), 1)


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain model, so that a layer has one name however it is wrapped."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        else:
            return model


def trained_layers(model: nn.Module) -> dict[str, BlockSparseLinear]:
    """The layers to train, by name."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseLinear) and module.values.requires_grad and module.pattern.nnz
    }
    if not layers:
        raise BlockSparseError("model must have a BlockSparseLinear that requires a gradient, got none")
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        check_movable(name, layer)
        owner = owners.setdefault(id(layer.values), name)
        if owner != name:
            raise BlockSparseError(f"layers must not share values, got {owner!r} and {name!r}: share the module")
    return layers


def check_movable(name: str, layer: BlockSparseLinear) -> None:
    """Raises :class:`BlockSparseError` unless single blocks of the layer can move: FSDP shards its values."""
    if type(layer.values.data) is not Tensor or layer.values.is_meta:
        raise BlockSparseError(
            f"the values of layer {name!r} must be an ordinary tensor with data, got "
            f"{type(layer.values.data).__name__} on {layer.values.device}: their blocks cannot move"
        )


def schedules_by_layer(
    schedule: DensitySchedule | Mapping[str, DensitySchedule] | None, layers: dict[str, BlockSparseLinear]
) -> dict[str, DensitySchedule]:
    """A schedule for every layer; constant where none is given."""
    if not isinstance(schedule, Mapping):
        schedule = dict.fromkeys(layers, schedule if schedule is not None else ConstantDensity())
    unknown = sorted(set(schedule) - set(layers))
    if unknown:
        raise BlockSparseError(f"schedule must name sparse layers that are trained, got {unknown}")
    for name, each in schedule.items():
        if not hasattr(each, "density") or not hasattr(each, "end"):
            raise BlockSparseError(f"schedule must be a density schedule, got {each!r} for layer {name!r}")
    return {name: schedule.get(name, ConstantDensity()) for name in layers}
