"""Blocks to and from SciPy's sparse matrices and NumPy arrays; memory is shared where the layouts agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import BlockSparseError
from .optional import require
from .pattern import BlockPattern, on_cpu
from .pattern_input import as_pattern

# What SciPy's sparse matrices compute in; NumPy has no bfloat16, SciPy no float16.
_SCIPY_DTYPES = (torch.float32, torch.float64)


def blocks_to_scipy(pattern: BlockPattern, values: Tensor) -> Any:
    """A ``scipy.sparse.bsr_matrix`` [O, I] with the stored blocks.

    It shares memory with values on the CPU whose slots are in row order.

    Args:
        pattern: the support.
        values: [nnz, bh, bw], float32 or float64, on any device.

    Raises:
        BlockSparseError: another dtype, or O or I is no multiple of the block: SciPy has no form for it.
        MissingPackageError: SciPy is not installed.
    """
    scipy_sparse = require("scipy.sparse", "scipy")
    if any(side % block for side, block in zip(pattern.shape, pattern.block_shape, strict=True)):
        raise BlockSparseError(
            f"to_scipy needs a shape that is a multiple of the block {pattern.block_shape}, got {pattern.shape}"
        )
    if values.dtype not in _SCIPY_DTYPES:
        raise BlockSparseError(f"to_scipy needs float32 or float64 values, as SciPy does, got {values.dtype}")
    values = values.detach().cpu()
    if not pattern.in_row_order():
        values = values[pattern.row_slots.long()]
    # The index arrays of a pattern are immutable and shared, SciPy's are the user's: they are copied.
    members = (values.numpy(), pattern.col_indices.numpy().copy(), pattern.crow_indices.numpy().copy())
    return scipy_sparse.bsr_matrix(members, shape=pattern.shape, blocksize=pattern.block_shape, copy=False)


@on_cpu
def blocks_from_scipy(matrix: Any, block_shape: tuple[int, int] | None) -> tuple[BlockPattern, Tensor]:
    """The pattern and the values [nnz, bh, bw] of a SciPy sparse matrix.

    A BSR matrix gives its stored blocks, in its order, and shares its memory; any other format the blocks that hold a
    stored element, and equal places are summed, as SciPy does.

    Args:
        matrix: any format of ``scipy.sparse``, float32 or float64.
        block_shape: (bh, bw); a BSR matrix's own, else (32, 32), if not given.

    Raises:
        BlockSparseError: no SciPy matrix, another dtype, or a block shape that contradicts a BSR matrix.
    """
    if not (hasattr(matrix, "tocoo") and hasattr(matrix, "format")):
        raise BlockSparseError(f"matrix must be a SciPy sparse matrix, got {type(matrix).__name__}")
    if matrix.dtype.kind != "f" or matrix.dtype.itemsize not in (4, 8):
        raise BlockSparseError(f"matrix must be float32 or float64, got {matrix.dtype}")
    pattern = as_pattern(matrix, block_shape=block_shape)
    if matrix.format == "bsr":
        return pattern, torch.as_tensor(matrix.data)
    entries = matrix.tocoo()
    values = torch.zeros((pattern.nnz, *pattern.block_shape), dtype=torch.as_tensor(entries.data).dtype)
    rows, cols = torch.as_tensor(entries.row).long(), torch.as_tensor(entries.col).long()
    (height, width), columns = pattern.block_shape, pattern.grid_shape[1]
    coords = pattern.block_coords.long()
    # Slots of such a pattern are in row order, so their keys ascend.
    keys = coords[:, 0] * columns + coords[:, 1]
    slots = torch.searchsorted(keys, (rows // height) * columns + cols // width)
    values.index_put_((slots, rows % height, cols % width), torch.as_tensor(entries.data), accumulate=True)
    return pattern, values


def dense_to_numpy(dense: Tensor) -> Any:
    """A dense matrix as a NumPy array of the same dtype.

    Raises:
        BlockSparseError: bfloat16, which NumPy has not.
    """
    if dense.dtype == torch.bfloat16:
        raise BlockSparseError("to_numpy needs a dtype that NumPy has, got torch.bfloat16: convert the values first")
    return dense.detach().cpu().numpy()


@on_cpu
def dense_from_numpy(array: Any) -> Tensor:
    """A NumPy matrix [O, I] as a tensor that shares its memory where it can.

    Raises:
        BlockSparseError: no floating-point array of 2 dimensions.
    """
    if not hasattr(array, "__array__") or getattr(array, "ndim", None) != 2 or array.dtype.kind != "f":
        found = f"{array.dtype} {list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
        raise BlockSparseError(f"array must be a floating-point NumPy array of 2 dimensions, got {found}")
    try:
        return torch.as_tensor(array)
    except (TypeError, ValueError):  # float128, or negative strides
        raise BlockSparseError(
            f"array must be float64, float32 or float16 without negative strides, got {array.dtype}"
        ) from None
