"""What a user may hand over as a pattern: a BlockPattern, a bool grid, a BSR tensor, a SciPy sparse matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_pair
from .errors import BlockSparseError
from .pattern import BlockPattern, on_cpu

DEFAULT_BLOCK_SHAPE = (32, 32)


@on_cpu
def as_pattern(
    pattern: Any, shape: tuple[int, int] | None = None, block_shape: tuple[int, int] | None = None
) -> BlockPattern:
    """``pattern`` as a :class:`BlockPattern`.

    Args:
        pattern: a BlockPattern; a bool grid [R, C]; a ``torch.sparse_bsr`` tensor (its stored blocks); a SciPy sparse
            matrix or array (BSR: its stored blocks; any other format: the blocks that hold a stored element).
        shape: (O, I) that the pattern must have. A bool grid without it has (R * bh, C * bw).
        block_shape: (bh, bw) that the pattern must have; for what carries none, (32, 32) if not given.

    Raises:
        BlockSparseError: ``shape`` or ``block_shape`` contradicts the pattern.
    """
    if block_shape is not None:
        block_shape = check_pair("block_shape", block_shape)
    if isinstance(pattern, BlockPattern):
        result = pattern
    elif isinstance(pattern, Tensor) and pattern.layout == torch.sparse_bsr:
        result = pattern_from_bsr(pattern)
    elif hasattr(pattern, "tocoo") and hasattr(pattern, "format"):
        result = _pattern_from_scipy(pattern, block_shape)
    elif isinstance(pattern, (Tensor, list, tuple)) or hasattr(pattern, "__array__"):
        return BlockPattern.from_mask(pattern, block_shape or DEFAULT_BLOCK_SHAPE, shape)
    else:
        raise BlockSparseError(
            "pattern must be a BlockPattern, a bool grid, a torch.sparse_bsr tensor or a SciPy sparse matrix, "
            f"got {type(pattern).__name__}"
        )
    if shape is not None and result.shape != tuple(shape):
        raise BlockSparseError(
            f"pattern must have shape (out_features, in_features) = {tuple(shape)}, got {result.shape}"
        )
    if block_shape is not None and result.block_shape != block_shape:
        raise BlockSparseError(f"block_shape {block_shape} contradicts the pattern's {result.block_shape}")
    return result


@on_cpu
def pattern_from_bsr(bsr: Tensor) -> BlockPattern:
    """The pattern of a ``torch.sparse_bsr`` matrix; slots in the order of its values."""
    if not isinstance(bsr, Tensor) or bsr.layout != torch.sparse_bsr or bsr.dim() != 2:
        raise BlockSparseError(f"bsr must be a torch.sparse_bsr matrix, got {getattr(bsr, 'layout', type(bsr))}")
    block_shape = tuple(bsr.values().shape[-2:])
    coords = _expand_rows(bsr.crow_indices().cpu(), bsr.col_indices().cpu())
    return BlockPattern.from_coords(coords, tuple(bsr.shape), block_shape)


def _pattern_from_scipy(matrix: Any, block_shape: tuple[int, int] | None) -> BlockPattern:
    if matrix.format == "bsr":
        coords = _expand_rows(torch.as_tensor(matrix.indptr), torch.as_tensor(matrix.indices))
        return BlockPattern.from_coords(coords, matrix.shape, matrix.blocksize)
    height, width = block_shape or DEFAULT_BLOCK_SHAPE
    entries = matrix.tocoo()
    rows, cols = torch.as_tensor(entries.row).long() // height, torch.as_tensor(entries.col).long() // width
    coords = torch.unique(torch.stack((rows, cols), 1), dim=0)
    return BlockPattern.from_coords(coords, matrix.shape, (height, width))


def _expand_rows(offsets: Tensor, cols: Tensor) -> Tensor:
    """Compressed rows -> coordinates [nnz, 2]."""
    rows = torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff().long())
    return torch.stack((rows, cols.long()), 1)
