"""A saved model put into a model: planned and checked in full first, then carried out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .block_sparse_linear import BlockSparseLinear
from .checkpoint_file import SavedModel
from .errors import BlockSparseError
from .layer_record import LayerRecord
from .layer_replacement import check_fits, keeps_geometry, new_layer, put_layer

_SHOWN_NAMES = 6


@dataclass(frozen=True)
class LoadPlan:
    """What loading will change. Made by :func:`plan_load`, which changes nothing.

    Attributes:
        kept: layers of the model that take the saved tensors, with their record.
        replaced: {path: (the new layer, its record)}, filled already; one object for all paths of a shared module.
        tensors: {name: the model's parameter or buffer} that is not part of a sparse layer.
        empty_buffers: the same for buffers that hold no data and are in no state dict.
    """

    kept: dict[str, tuple[BlockSparseLinear, LayerRecord]] = field(default_factory=dict)
    replaced: dict[str, tuple[BlockSparseLinear, LayerRecord]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    empty_buffers: dict[str, Tensor] = field(default_factory=dict)


def plan_load(saved: SavedModel, model: nn.Module, device: torch.device) -> LoadPlan:
    """Checks that the saved model fits ``model``, and makes the layers that will be put in.

    Args:
        saved: the open file.
        model: is not changed.
        device: where tensors go that are on the meta device now.

    Raises:
        BlockSparseError: a layer or tensor is missing, unexpected or of another shape.
    """
    try:
        return _plan(saved, model, device)
    except BlockSparseError as error:
        raise BlockSparseError(f"{saved.path}: {error}") from None


def _plan(saved: SavedModel, model: nn.Module, device: torch.device) -> LoadPlan:
    plan = LoadPlan()
    modules = dict(model.named_modules(remove_duplicate=False))
    to_replace: dict[str, tuple[nn.Module, LayerRecord]] = {}
    for record in saved.description.layers:
        check_fits(record, record.path, modules)
        module = modules[record.path]
        if keeps_geometry(record, module):
            plan.kept[record.path] = (module, record)
        elif record.path == "":
            raise BlockSparseError(
                f"the model itself is a {type(module).__name__}, which cannot be replaced in place: load into a "
                f"BlockSparseLinear with block_shape={record.block_shape} and activation={record.activation!r}"
            )
        else:
            to_replace[record.path] = (module, record)
    _check_shared_modules(saved, {**to_replace, **plan.kept}, modules)
    _plan_tensors(plan, saved, model, list(to_replace))
    # Last, because it is what costs memory.
    _make_layers(plan, saved, to_replace, device)
    return plan


def _check_shared_modules(
    saved: SavedModel, layers: dict[str, tuple[nn.Module, LayerRecord]], modules: dict[str, nn.Module]
) -> None:
    """A module at several paths is one layer: the file must hold the same one for each of them."""
    first: dict[int, str] = {}
    for path, (module, record) in layers.items():
        other = first.setdefault(id(module), path)
        if other != path:
            other_record = layers[other][1]
            same = all(
                saved.source(record.tensor_name(name)) == saved.source(other_record.tensor_name(name))
                for name in ("values", "block_coords")
            )
            if not same:
                raise BlockSparseError(f"the model has one module at {other!r} and {path!r}, the file two layers")
    for path, module in modules.items():
        if path not in layers and id(module) in first:
            raise BlockSparseError(f"the model has one module at {first[id(module)]!r} and {path!r}, the file has not")


def _plan_tensors(plan: LoadPlan, saved: SavedModel, model: nn.Module, replaced: list[str]) -> None:
    new_names = {
        record.tensor_name(name)
        for record in saved.description.layers
        for name in ("values", "block_coords", "bias")
        if name != "bias" or record.bias
    }
    gone = tuple(f"{path}." for path in replaced)
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name in new_names or not name.startswith(gone)
    }
    found = set(saved.names())
    _refuse("missing in the file", sorted((state.keys() | new_names) - found))
    _refuse("in the file, but not in the model", sorted(found - state.keys() - new_names))
    for name, tensor in state.items():
        if name not in new_names:
            _check_tensor(saved, name, tensor)
            plan.tensors[name] = tensor
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer.is_meta and name not in state and not name.startswith(gone):
            if not saved.has(name):
                raise BlockSparseError(f"the buffer {name!r} of the model holds no data, nor does the file")
            _check_tensor(saved, name, buffer)
            plan.empty_buffers[name] = buffer
    _check_ties(saved, plan.tensors)


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        raise BlockSparseError(f"{what}: {', '.join(names[:_SHOWN_NAMES])}{more}")


def _check_tensor(saved: SavedModel, name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, nn.Parameter):
        raise BlockSparseError(f"{name} must be a plain tensor in the model, got {type(tensor).__name__}")
    if saved.shape(name) != tuple(tensor.shape):
        raise BlockSparseError(f"{name} is {saved.shape(name)} in the file, {tuple(tensor.shape)} in the model")
    stored = saved.dtype(name)
    if stored.is_floating_point != tensor.is_floating_point() or stored.is_complex != tensor.is_complex():
        raise BlockSparseError(f"{name} is {stored} in the file, {tensor.dtype} in the model")


def _check_ties(saved: SavedModel, tensors: dict[str, Tensor]) -> None:
    """A tensor that the model has under several names can hold one content only."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        other = first.setdefault(id(tensor), name)
        if saved.source(other) != saved.source(name) and not torch.equal(saved.tensor(other), saved.tensor(name)):
            raise BlockSparseError(f"the model ties {other} and {name}, which differ in the file")


def _make_layers(
    plan: LoadPlan, saved: SavedModel, to_replace: dict[str, tuple[nn.Module, LayerRecord]], device: torch.device
) -> None:
    by_module: dict[int, BlockSparseLinear] = {}
    by_source: dict[str, nn.Parameter] = {}
    for path, (module, record) in to_replace.items():
        layer = by_module.get(id(module))
        if layer is None:
            # Data keeps the model's device and dtype; what has no data takes the file's dtype.
            weight = module.values if isinstance(module, BlockSparseLinear) else module.weight
            layer = new_layer(
                record,
                module,
                saved.patterns[path],
                device=device if weight.is_meta else weight.device,
                dtype=None if weight.is_meta else weight.dtype,
            )
            _fill(layer, saved, record)
            for name in ("values", "bias"):
                parameter = getattr(layer, name)
                if parameter is not None:
                    # Parameters that were tied when they were saved are tied again.
                    tied = by_source.setdefault(saved.source(record.tensor_name(name)), parameter)
                    if tied is not parameter and (tied.device, tied.dtype) == (parameter.device, parameter.dtype):
                        layer.register_parameter(name, tied)
            by_module[id(module)] = layer
        plan.replaced[path] = (layer, record)


def _fill(layer: BlockSparseLinear, saved: SavedModel, record: LayerRecord) -> None:
    names = [name for name in ("values", "block_coords", "bias") if name != "bias" or record.bias]
    layer.load_state_dict({name: saved.tensor(record.tensor_name(name)) for name in names})


def carry_out(plan: LoadPlan, saved: SavedModel, model: nn.Module, device: torch.device) -> None:
    """Changes the model as planned.

    Args:
        plan: of :func:`plan_load`.
        saved: the same open file.
        model: the same model.
        device: where tensors go that are on the meta device now.
    """
    for path, (layer, record) in plan.replaced.items():
        put_layer(model, record, path, layer)
    for layer, record in plan.kept.values():
        if layer.values.is_meta:
            layer.to(record.torch_dtype).to_empty(device=device)
        _fill(layer, saved, record)
    materialised: dict[int, Tensor] = {}
    with torch.no_grad():
        for name, tensor in (*plan.tensors.items(), *plan.empty_buffers.items()):
            if not tensor.is_meta:
                tensor.copy_(saved.tensor(name))
                continue
            # What is one tensor in the model stays one.
            if id(tensor) not in materialised:
                data = saved.tensor(name).to(device)
                is_parameter = isinstance(tensor, nn.Parameter)
                materialised[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
            _assign(model, name, materialised[id(tensor)])


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    (module._parameters if leaf in module._parameters else module._buffers)[leaf] = tensor
