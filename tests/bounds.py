"""The error bound of every result, for each output block on its own (STYLE.md).

    |ours - ref| <= 2 max|torch - ref| + eps(out) max|ref| + eps(float32) max(|x| |W|ᵀ)

The maxima are over one output block: a token tile times a block side, or one stored block of a weight gradient. ``ref``
is the float64 reference, ``torch`` is dense PyTorch in the dtype of ``ours``; PyTorch's CPU has dense products in
all four dtypes, so nothing stands in for it. In float64 dense PyTorch *is* the reference, so that its error does not
show: the last term is 8 eps(float64) max(|x| |W|ᵀ) there, far below what a single float32 operation would leave.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

TOKEN_TILE = 32


def by_tile(matrix: Tensor, tile: tuple[int, int]) -> Tensor:
    """[M, N] -> [tiles, elements of a tile], zero past the matrix."""
    rows, cols = (-(-side // length) for side, length in zip(matrix.shape, tile, strict=True))
    padded = pad(matrix, (0, cols * tile[1] - matrix.shape[1], 0, rows * tile[0] - matrix.shape[0]))
    return padded.view(rows, tile[0], cols, tile[1]).transpose(1, 2).reshape(rows * cols, tile[0] * tile[1])


def by_slot(blocks: Tensor) -> Tensor:
    """[nnz, bh, bw] -> [nnz, bh bw]."""
    return blocks.flatten(1)


def assert_within_bound(ours: Tensor, dense: Tensor, reference: Tensor, magnitude: Tensor) -> None:
    """Fails where an element of ``ours`` is further from ``reference`` than the bound of its block; NaN fails.

    Args:
        ours: [blocks, elements], from :func:`by_tile` or :func:`by_slot`.
        dense: the same from dense PyTorch, in the same dtype.
        reference: the same in float64.
        magnitude: the same of the product of absolute values, in float64.
    """
    assert ours.dtype == dense.dtype and reference.dtype == torch.float64
    assert ours.shape == dense.shape == reference.shape == magnitude.shape
    if not ours.numel():
        return
    accumulation = 8 * torch.finfo(torch.float64).eps if ours.dtype == torch.float64 else torch.finfo(torch.float32).eps
    error = (ours.double() - reference).abs().amax(1)
    bound = (
        2 * (dense.double() - reference).abs().amax(1)
        + torch.finfo(ours.dtype).eps * reference.abs().amax(1)
        + accumulation * magnitude.abs().amax(1)
    )
    wrong = ~(error <= bound)  # a NaN on either side is wrong
    if wrong.any():
        block = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} output blocks are out of bounds; the first is {block}: "
            f"error {error[block]:.3e}, bound {bound[block]:.3e}"
        )
