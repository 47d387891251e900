"""The three indices of a pattern, packed in one int32 tensor; ``native/packed_index.h`` takes it apart the same way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_int, check_integers
from .errors import BlockSparseError


class PatternIndex(NamedTuple):
    """The arrays of a pattern, all int32: views of one packed tensor, each starting on a 16-byte boundary."""

    crow_indices: Tensor  # [R + 1]
    col_indices: Tensor  # [nnz]
    row_slots: Tensor  # [nnz]
    ccol_indices: Tensor  # [C + 1]
    row_indices: Tensor  # [nnz]
    col_slots: Tensor  # [nnz]
    block_coords: Tensor  # [nnz, 2]
    row_order: Tensor  # [R]
    col_order: Tensor  # [C]


def _sections(grid_rows: int, grid_cols: int, nnz: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of each array in the packed index."""
    offset = 0
    for length in (grid_rows + 1, nnz, nnz, grid_cols + 1, nnz, nnz, 2 * nnz, grid_rows, grid_cols):
        yield offset, length
        offset += (length + 3) // 4 * 4


def packed_index_size(grid_rows: int, grid_cols: int, nnz: int) -> int:
    """Length of the packed index in int32 elements."""
    *_, (offset, length) = _sections(grid_rows, grid_cols, nnz)
    return offset + (length + 3) // 4 * 4


def unpack_index(packed: Tensor, grid_rows: int, grid_cols: int, nnz: int) -> PatternIndex:
    """Names the parts of a packed index without copying."""
    parts = [packed[offset : offset + length] for offset, length in _sections(grid_rows, grid_cols, nnz)]
    index = PatternIndex(*parts)
    return index._replace(block_coords=index.block_coords.view(nnz, 2))


def _compress(sorted_indices: Tensor, length: int) -> Tensor:
    """Offsets [length + 1] of each run in ascending indices."""
    counts = torch.bincount(sorted_indices, minlength=length)
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def _longest_first(offsets: Tensor) -> Tensor:
    """The lines of compressed offsets by falling length; ties keep their order, so that neighbours stay together."""
    return offsets.diff().argsort(descending=True, stable=True)


def build_packed_index(block_coords: Tensor, grid: tuple[int, int]) -> Tensor:
    """All arrays of a pattern from its coordinates, packed in one int32 tensor on the CPU."""
    coords = check_integers("block_coords", block_coords, 2)
    if coords.shape[1] != 2:
        raise BlockSparseError(f"block_coords must be [nnz, 2], got {list(coords.shape)}")
    rows_count, cols_count = grid
    nnz = coords.shape[0]
    check_int("nnz", nnz, 0)
    rows, cols = coords.unbind(1)
    for name, indices, limit in (("block row", rows, rows_count), ("block column", cols, cols_count)):
        if nnz and (int(indices.min()) < 0 or int(indices.max()) >= limit):
            raise BlockSparseError(
                f"block_coords: every {name} must be from 0 to {limit - 1}, "
                f"got {int(indices.min())} to {int(indices.max())}"
            )
    # A stable sort by row of what is sorted by column (and the reverse); keys stay below 2**62.
    row_keys, row_slots = (rows * cols_count + cols).sort()
    if nnz > 1 and bool((row_keys[1:] == row_keys[:-1]).any()):
        twice = int(row_keys[1:][row_keys[1:] == row_keys[:-1]][0])
        raise BlockSparseError(
            f"block_coords must not hold a block twice, got ({twice // cols_count}, {twice % cols_count}) again"
        )
    col_slots = (cols * rows_count + rows).argsort()
    crow_indices = _compress(rows[row_slots], rows_count)
    ccol_indices = _compress(cols[col_slots], cols_count)
    parts = PatternIndex(
        crow_indices=crow_indices,
        col_indices=cols[row_slots],
        row_slots=row_slots,
        ccol_indices=ccol_indices,
        row_indices=rows[col_slots],
        col_slots=col_slots,
        block_coords=coords,
        row_order=_longest_first(crow_indices),
        col_order=_longest_first(ccol_indices),
    )
    packed = torch.zeros(packed_index_size(rows_count, cols_count, nnz), dtype=torch.int32)
    for part, view in zip(parts, unpack_index(packed, rows_count, cols_count, nnz), strict=True):
        view.copy_(part)
    # The clone's version counter is 0, and stays 0 unless somebody writes to it.
    return packed.clone()


def copy_to_device(packed: Tensor, geometry: list[int], device: torch.device) -> Tensor:
    """The packed index on ``device``; on a Hopper GPU with the work lists of its kernels behind the arrays."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        packed = torch.cat((packed, torch.ops.pytorch_block_sparse.work_lists(packed, geometry)))
    return packed.to(device)
