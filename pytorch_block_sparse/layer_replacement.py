"""Putting a BlockSparseLinear where a model has a dense layer: ``nn.Linear``, or transformers' ``Conv1D`` (GPT-2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from .block_sparse_linear import BlockSparseLinear
from .dense_layers import dense_weight
from .dense_origin import DenseOrigin, activation_of
from .errors import BlockSparseError
from .layer_record import LayerRecord
from .pattern import BlockPattern


def check_fits(record: LayerRecord, path: str, modules: Mapping[str, nn.Module]) -> None:
    """Checks that the recorded layer can stand at ``path``.

    Args:
        record: of a layer.
        path: in the model, which may name it otherwise than the file.
        modules: of the model, by path.

    Raises:
        BlockSparseError: it cannot; the message names the layer.
    """
    module = modules.get(path)
    if module is None:
        raise BlockSparseError(f"layer {record.path!r}: the model has no such module")
    if isinstance(module, BlockSparseLinear):
        shape: tuple[int, ...] = (module.out_features, module.in_features)
    else:
        weight = dense_weight(module)
        if weight is None:
            raise BlockSparseError(
                f"layer {record.path!r}: the model must have nn.Linear, transformers' Conv1D or BlockSparseLinear "
                f"there, got {type(module).__name__}"
            )
        shape = tuple(weight.shape)
    if shape != record.shape:
        raise BlockSparseError(
            f"layer {record.path!r}: saved with (out_features, in_features) = {record.shape}, the model has {shape}"
        )
    if (module.bias is not None) != record.bias:
        with_or_without = ("without", "with")
        raise BlockSparseError(
            f"layer {record.path!r}: saved {with_or_without[record.bias]} a bias, the model's layer is "
            f"{with_or_without[not record.bias]} one"
        )
    if record.activation_name is not None:
        _check_activation(record, path, modules)


def _check_activation(record: LayerRecord, path: str, modules: Mapping[str, nn.Module]) -> None:
    module = modules[path]
    found = modules[path.rpartition(".")[0]]._modules.get(record.activation_name) if path else None
    origin = module.dense_origin if isinstance(module, BlockSparseLinear) else DenseOrigin()
    if origin.activation_name == record.activation_name and type(found) is nn.Identity:
        found = origin.activation_module
    if activation_of(found) != record.activation:
        raise BlockSparseError(
            f"layer {record.path!r}: its saved {record.activation} stands for the module {record.activation_name!r}, "
            f"where the model has {'none' if found is None else type(found).__name__}"
        )


def keeps_geometry(record: LayerRecord, module: nn.Module) -> bool:
    """Whether ``module`` is a BlockSparseLinear that can take the recorded tensors as it is; nnz may differ."""
    return (
        isinstance(module, BlockSparseLinear)
        and module.block_shape == record.block_shape
        and module.activation == record.activation
        and module.dense_origin.activation_name == record.activation_name
    )


def new_layer(
    record: LayerRecord,
    like: nn.Module,
    pattern: BlockPattern | None = None,
    *,
    device: torch.device | str = "meta",
    dtype: torch.dtype | None = None,
) -> BlockSparseLinear:
    """The recorded layer with uninitialised parameters; the random generators are not touched.

    Args:
        record: its geometry.
        like: the layer that it replaces: gives the mode and which parameters are trained.
        pattern: its blocks; the first nnz of the grid if they are not known yet.
        device: of the parameters.
        dtype: of the parameters; as recorded if not given.
    """
    if pattern is None:
        pattern = _first_blocks(record)
    layer = BlockSparseLinear(
        record.shape[1],
        record.shape[0],
        record.bias,
        pattern=pattern,
        activation=record.activation,
        device="meta",
        dtype=dtype or record.torch_dtype,
    )
    if torch.device(device).type != "meta":
        layer = layer.to_empty(device=device)
    weight = like.values if isinstance(like, BlockSparseLinear) else like.weight
    layer.values.requires_grad_(weight.requires_grad)
    if layer.bias is not None:
        layer.bias.requires_grad_(like.bias.requires_grad)
    layer_type = like.dense_origin.layer_type if isinstance(like, BlockSparseLinear) else type(like)
    layer.dense_origin = DenseOrigin(layer_type)
    return layer.train(like.training)


def put_layer(model: nn.Module, record: LayerRecord, path: str, layer: BlockSparseLinear) -> None:
    """Puts a recorded layer at ``path``, which is not the model itself, and the activation beside it in order.

    An activation that the layer computes gives way to an ``nn.Identity``; one that only the former layer computed is
    back in its place.
    """
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    former = parent._modules[name]
    if former is layer:
        return  # the parent hangs in several places
    if isinstance(former, BlockSparseLinear) and former.dense_origin.activation_name is not None:
        setattr(parent, former.dense_origin.activation_name, former.dense_origin.activation_module)
    setattr(parent, name, layer)
    if record.activation_name is not None:
        activation = parent._modules[record.activation_name]
        layer.dense_origin = replace(
            layer.dense_origin, activation_name=record.activation_name, activation_module=activation
        )
        setattr(parent, record.activation_name, nn.Identity().train(activation.training))


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Puts ``module`` at ``path``, which is not the model itself."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _first_blocks(record: LayerRecord) -> BlockPattern:
    cols = -(-record.shape[1] // record.block_shape[1])
    keys = torch.arange(record.nnz, device="cpu")
    return BlockPattern.from_coords(torch.stack((keys // cols, keys % cols), 1), record.shape, record.block_shape)
