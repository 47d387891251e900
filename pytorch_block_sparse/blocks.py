"""Moving between a dense matrix [O, I] and blocks [nnz, bh, bw]: exact copies, vectorised, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .pattern import BlockPattern, block_grid


def to_grid(dense: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """[O, I] -> [R, C, bh, bw], zero past the edges; a view where the blocks fit exactly."""
    (rows, cols), (height, width) = block_grid(tuple(dense.shape), block_shape), block_shape
    missing = (rows * height - dense.shape[0], cols * width - dense.shape[1])
    if any(missing):
        dense = pad(dense, (0, missing[1], 0, missing[0]))
    return dense.reshape(rows, height, cols, width).transpose(1, 2)


def from_grid(grid: Tensor, shape: tuple[int, int]) -> Tensor:
    """[R, C, bh, bw] -> [O, I], without what lies past the edges."""
    rows, cols, height, width = grid.shape
    return grid.transpose(1, 2).reshape(rows * height, cols * width)[: shape[0], : shape[1]]


def gather_blocks(dense: Tensor, pattern: BlockPattern) -> Tensor:
    """The stored blocks of a dense matrix: [O, I] -> [nnz, bh, bw], zero past the edges."""
    rows, cols = pattern.block_coords.to(dense.device).long().unbind(1)
    return to_grid(dense, pattern.block_shape)[rows, cols]


def scatter_blocks(values: Tensor, pattern: BlockPattern) -> Tensor:
    """The dense matrix of stored blocks: [nnz, bh, bw] -> [O, I], zero elsewhere.

    What an edge block holds past O or I is dropped.
    """
    rows, cols = pattern.block_coords.to(values.device).long().unbind(1)
    grid = values.new_zeros((*pattern.grid_shape, *pattern.block_shape))
    return from_grid(grid.index_put((rows, cols), values), pattern.shape).contiguous()


def edge_mask(pattern: BlockPattern, device: torch.device | str = "cpu") -> Tensor | None:
    """bool [nnz, bh, bw]: true inside W. None where every block is, so that there is nothing to mask."""
    if all(side % block == 0 for side, block in zip(pattern.shape, pattern.block_shape, strict=True)):
        return None
    coords = pattern.block_coords.to(device).long()
    inside = [
        coords[:, axis, None] * block + torch.arange(block, device=device) < side
        for axis, (side, block) in enumerate(zip(pattern.shape, pattern.block_shape, strict=True))
    ]
    return inside[0][:, :, None] & inside[1][:, None, :]


def clear_past_edges(values: Tensor, pattern: BlockPattern) -> Tensor:
    """Zeroes, in place, what edge blocks hold past O or I; returns ``values``."""
    inside = edge_mask(pattern, values.device)
    if inside is not None:
        values.masked_fill_(~inside, 0)
    return values
