"""Other state dicts as BlockSparseLinear's own: those of ``nn.Linear``, and of pytorch_block_sparse 0.1.x (2020)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .blocks import gather_blocks
from .errors import BlockSparseError
from .pattern import BlockPattern, on_cpu

_LEGACY_DERIVED = (
    "weight.cols_a",
    "weight.row_start_ends_a",
    "weight.rows_b",
    "weight.col_start_ends_b",
    "weight.blocks",
)


@on_cpu
def to_native(state: Mapping[str, Tensor], pattern: BlockPattern) -> dict[str, Tensor]:
    """The entries of one layer, converted where they are in another format.

    Args:
        state: entries without the layer's prefix.
        pattern: the layer's pattern; blocks of a dense weight are gathered at its places.

    Raises:
        BlockSparseError: the entries are damaged or do not fit the layer.
    """
    if "values" in state or "block_coords" in state:
        return dict(state)
    if "weight.data" in state:
        return _from_legacy(state, pattern)
    if "weight" in state:
        return _from_dense(state, pattern)
    return dict(state)


def _from_dense(state: Mapping[str, Tensor], pattern: BlockPattern) -> dict[str, Tensor]:
    rest = dict(state)
    weight = rest.pop("weight")
    if tuple(weight.shape) != pattern.shape:
        raise BlockSparseError(f"weight must be {pattern.shape}, got {tuple(weight.shape)}")
    return {**rest, "values": gather_blocks(weight, pattern), "block_coords": pattern.block_coords}


def _from_legacy(state: Mapping[str, Tensor], pattern: BlockPattern) -> dict[str, Tensor]:
    """0.1.x: ``weight.data`` [nnz * bh, bw] holds each block transposed; ``weight.cols_a`` [nnz, 2] the (block column,
    slot) of the entries in row order; ``weight.row_start_ends_a`` [R + 1] the rows' offsets. The rest is derived."""
    rest = {name: tensor for name, tensor in state.items() if name not in (*_LEGACY_DERIVED, "weight.data")}
    missing = [name for name in _LEGACY_DERIVED[:2] if name not in state]
    if missing:
        raise BlockSparseError(f"a state dict of pytorch_block_sparse 0.1.x must hold {' and '.join(missing)}")
    data, entries, offsets = (state[name] for name in ("weight.data", *_LEGACY_DERIVED[:2]))
    height, width = pattern.block_shape
    nnz = entries.shape[0]
    if entries.dim() != 2 or entries.shape[1] != 2:
        raise BlockSparseError(f"weight.cols_a must be [nnz, 2], got {list(entries.shape)}")
    if tuple(data.shape) != (nnz * height, width):
        raise BlockSparseError(
            f"weight.data must be [nnz * {height}, {width}] with nnz = {nnz} for blocks of {pattern.block_shape}, "
            f"got {list(data.shape)}"
        )
    entries, offsets = entries.cpu().long(), offsets.cpu().long()
    counts = offsets.diff()
    if (
        tuple(offsets.shape) != (pattern.grid_shape[0] + 1,)
        or int(offsets[0]) != 0
        or int(offsets[-1]) != nnz
        or bool((counts < 0).any())
    ):
        raise BlockSparseError(
            f"weight.row_start_ends_a must be {pattern.grid_shape[0] + 1} offsets that rise from 0 to {nnz}"
        )
    slots = entries[:, 1]
    if not torch.equal(slots.sort()[0], torch.arange(nnz)):
        raise BlockSparseError(f"weight.cols_a must name every slot from 0 to {nnz - 1} once")
    coords = torch.empty((nnz, 2), dtype=torch.int64)
    coords[slots, 0] = torch.repeat_interleave(torch.arange(pattern.grid_shape[0]), counts)
    coords[slots, 1] = entries[:, 0]
    values = data.reshape(nnz, width, height).transpose(1, 2)
    return {**rest, "values": values, "block_coords": coords}
