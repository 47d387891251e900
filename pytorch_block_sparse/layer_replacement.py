"""Putting a BlockSparseLinear where a model has a dense layer: ``nn.Linear``, or transformers' ``Conv1D`` (GPT-2)."""

from __future__ import annotations

import torch
from torch import nn

from .block_sparse_linear import BlockSparseLinear
from .dense_layers import dense_weight
from .errors import BlockSparseError
from .layer_record import LayerRecord
from .pattern import BlockPattern


def check_fits(record: LayerRecord, module: nn.Module | None) -> None:
    """Raises:
    BlockSparseError: the recorded layer cannot stand where ``module`` is; the message names the layer.
    """
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


def keeps_geometry(record: LayerRecord, module: nn.Module) -> bool:
    """Whether ``module`` is a BlockSparseLinear that can take the recorded tensors as it is; nnz may differ."""
    return (
        isinstance(module, BlockSparseLinear)
        and module.block_shape == record.block_shape
        and module.activation == record.activation
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
    # What densify() makes of it again.
    layer.dense_type = getattr(like, "dense_type", nn.Linear) if isinstance(like, BlockSparseLinear) else type(like)
    return layer.train(like.training)


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Puts ``module`` at ``path``, which is not the model itself."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _first_blocks(record: LayerRecord) -> BlockPattern:
    cols = -(-record.shape[1] // record.block_shape[1])
    keys = torch.arange(record.nnz, device="cpu")
    return BlockPattern.from_coords(torch.stack((keys // cols, keys % cols), 1), record.shape, record.block_shape)
