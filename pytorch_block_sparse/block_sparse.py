"""BlockSparseMatrix: a pattern, its values, and their algebra."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .array_interop import blocks_from_scipy, blocks_to_scipy, dense_from_numpy, dense_to_numpy
from .blocks import clear_past_edges, gather_blocks, scatter_blocks, to_grid
from .checks import check_int, check_pair
from .errors import BlockSparseError
from .pattern import BlockPattern, block_grid
from .pattern_input import pattern_from_bsr


class BlockSparseMatrix:
    """A matrix W (O, I) of which some blocks are stored: a :class:`BlockPattern` and ``values`` [nnz, bh, bw].

    A view: it shares ``values`` with whoever made it (``BlockSparseLinear.weight`` shares the layer's parameter), and
    reads like a tensor where model code looks at a weight: ``shape``, ``dtype``, ``device``, ``requires_grad``,
    ``data``, ``grad``.

    Args:
        pattern: the support.
        values: [nnz, bh, bw], the block of each slot.

    >>> matrix = BlockSparseMatrix.from_dense(torch.eye(4), (2, 2), block_count=2)
    >>> matrix
    BlockSparseMatrix(shape=(4, 4), block_shape=(2, 2), nnz=2, dtype=torch.float32, device='cpu')
    >>> torch.equal(matrix.to_dense(), torch.eye(4))
    True
    """

    def __init__(self, pattern: BlockPattern, values: Tensor) -> None:
        expected = (pattern.nnz, *pattern.block_shape)
        if tuple(values.shape) != expected:
            raise BlockSparseError(f"values must be {expected} as the pattern, got {tuple(values.shape)}")
        self.pattern = pattern
        self.values = values

    # Constructors

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        block_shape: tuple[int, int] = (32, 32),
        block_count: int | None = None,
        blocks: list[tuple[int, int]] | None = None,
        *,
        pattern: BlockPattern | None = None,
    ) -> BlockSparseMatrix:
        """The blocks of a dense matrix, copied exactly.

        Args:
            dense: [O, I].
            block_shape: (bh, bw).
            block_count: keep this many blocks, the strongest by Euclidean norm. Not given: every block that is not all
                zero.
            blocks: keep the blocks at these (block row, block column) places instead.
            pattern: keep the blocks of this pattern instead.
        """
        if dense.dim() != 2:
            raise BlockSparseError(f"dense must have 2 dimensions, got {list(dense.shape)}")
        if sum(choice is not None for choice in (block_count, blocks, pattern)) > 1:
            raise BlockSparseError("give at most one of block_count, blocks and pattern")
        if pattern is None:
            block_shape = check_pair("block_shape", block_shape)
            pattern = _choose_pattern(dense, block_shape, block_count, blocks)
        elif pattern.shape != tuple(dense.shape):
            raise BlockSparseError(f"pattern must have the shape of dense {tuple(dense.shape)}, got {pattern.shape}")
        return cls(pattern, gather_blocks(dense, pattern))

    @classmethod
    def from_bsr(cls, bsr: Tensor) -> BlockSparseMatrix:
        """A ``torch.sparse_bsr`` tensor's blocks; its values are shared, not copied."""
        return cls(pattern_from_bsr(bsr), bsr.values())

    @classmethod
    def from_scipy(cls, matrix: Any, block_shape: tuple[int, int] | None = None) -> BlockSparseMatrix:
        """The blocks of a SciPy sparse matrix or array, float32 or float64.

        Args:
            matrix: BSR: its stored blocks, sharing its memory. Any other format: the blocks that hold a stored element.
            block_shape: (bh, bw); a BSR matrix's own, else (32, 32), if not given.
        """
        return cls(*blocks_from_scipy(matrix, block_shape))

    @classmethod
    def from_numpy(cls, array: Any, block_shape: tuple[int, int] = (32, 32)) -> BlockSparseMatrix:
        """The blocks of a dense NumPy array [O, I] that are not all zero, copied exactly."""
        return cls.from_dense(dense_from_numpy(array), block_shape)

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, int],
        n_blocks: int | None = None,
        blocks: list[tuple[int, int]] | None = None,
        block_shape: tuple[int, int] = (32, 32),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> BlockSparseMatrix:
        """``n_blocks`` random blocks (all blocks if neither is given), or those at ``blocks``, filled with zeros."""
        shape, block_shape = check_pair("shape", shape), check_pair("block_shape", block_shape)
        if n_blocks is not None and blocks is not None:
            raise BlockSparseError("give at most one of n_blocks and blocks")
        if blocks is not None:
            pattern = BlockPattern.from_coords(_coords(blocks), shape, block_shape)
        else:
            rows, cols = block_grid(shape, block_shape)
            pattern = BlockPattern.random(
                shape, block_shape=block_shape, nnz=rows * cols if n_blocks is None else n_blocks
            )
        return cls(pattern, torch.zeros((pattern.nnz, *block_shape), device=device, dtype=dtype))

    @classmethod
    def ones(cls, *args: Any, **kwargs: Any) -> BlockSparseMatrix:
        """As :meth:`zeros`, filled with ones."""
        matrix = cls.zeros(*args, **kwargs)
        clear_past_edges(matrix.values.fill_(1), matrix.pattern)
        return matrix

    @classmethod
    def randn(cls, *args: Any, positive: bool = False, **kwargs: Any) -> BlockSparseMatrix:
        """As :meth:`zeros`, filled with standard normal values (their absolute values if ``positive``)."""
        matrix = cls.zeros(*args, **kwargs)
        matrix.values.normal_()
        if positive:
            matrix.values.abs_()
        clear_past_edges(matrix.values, matrix.pattern)
        return matrix

    # Conversions

    def to_dense(self, data_replace: Tensor | None = None) -> Tensor:
        """The dense matrix [O, I]; of ``data_replace`` [nnz, bh, bw] in place of the values, if given."""
        return scatter_blocks(self.values if data_replace is None else data_replace, self.pattern)

    def to_bsr(self) -> Tensor:
        """A ``torch.sparse_bsr`` tensor; it shares the values when slots are in row order.

        Raises:
            BlockSparseError: O or I is no multiple of the block: such a matrix has no BSR form.
        """
        if any(side % block for side, block in zip(self.shape, self.block_shape, strict=True)):
            raise BlockSparseError(
                f"to_bsr needs a shape that is a multiple of the block {self.block_shape}, got {tuple(self.shape)}"
            )
        index = self.pattern.arrays(self.device)
        values = self.values if self.pattern.in_row_order() else self.values[index.row_slots.long()]
        return torch.sparse_bsr_tensor(index.crow_indices, index.col_indices, values, size=tuple(self.shape))

    def to_scipy(self) -> Any:
        """A ``scipy.sparse.bsr_matrix``; it shares the values when they are on the CPU with slots in row order.

        Raises:
            BlockSparseError: O or I is no multiple of the block, or the dtype is not SciPy's float32 or float64.
        """
        return blocks_to_scipy(self.pattern, self.values)

    def to_numpy(self) -> Any:
        """The dense matrix as a NumPy array [O, I], detached; bfloat16, which NumPy has not, is an error."""
        return dense_to_numpy(self.to_dense())

    def build_coo_block_index(self) -> Tensor:
        """int32 [2, nnz]: block row and block column of each slot."""
        return self.pattern.arrays(self.device).block_coords.t()

    # Algebra

    def reverse_matmul(self, dense_a: Tensor, transpose: bool = True) -> Tensor:
        """a Wᵀ if ``transpose``, else a W: [..., I] -> [..., O], or [..., O] -> [..., I]."""
        if transpose:
            return ops.linear(dense_a, self.values, self.pattern)
        return ops.input_grad(dense_a, self.values, self.pattern)

    def matmul_with_output_sparse_support(self, dense_a: Tensor, dense_b: Tensor) -> Tensor:
        """aᵀ b on this matrix's support: [..., O] and [..., I] -> [nnz, bh, bw]."""
        return ops.weight_grad(dense_a, dense_b, self.pattern)

    def block_norm(self, p: float = 2) -> Tensor:
        """The p-norm of every stored block, by slot: [nnz]."""
        return torch.linalg.vector_norm(self.values, ord=p, dim=(1, 2))

    def block_replace(self, block_replacements: Tensor) -> None:
        """Moves blocks: rows of (block row, block column, slot). Data stays in its slot; other blocks do not move."""
        replacements = block_replacements
        if replacements.dim() != 2 or replacements.shape[1] != 3:
            raise BlockSparseError(f"block_replacements must be [n, 3], got {list(replacements.shape)}")
        self.pattern = self.pattern.rewire(replacements[:, 2], replacements[:, :2])
        with torch.no_grad():
            clear_past_edges(self.values, self.pattern)

    def multiply_(self, factor: float) -> None:
        """Scales the values in place."""
        with torch.no_grad():
            self.values.mul_(factor)

    # What model code reads of a weight

    @property
    def shape(self) -> torch.Size:
        """(O, I)."""
        return torch.Size(self.pattern.shape)

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bh, bw)."""
        return self.pattern.block_shape

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one side of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """2."""
        return 2

    def numel(self) -> int:
        """Elements of W in stored blocks."""
        return self.pattern.stored_elements()

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Of the values."""
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        """Of the values."""
        return self.values.requires_grad

    @property
    def is_sparse(self) -> bool:
        """False: this is no ``torch.sparse`` tensor."""
        return False

    @property
    def data(self) -> Tensor:
        """The values [nnz, bh, bw] outside autograd, sharing memory."""
        return self.values.data

    @property
    def grad(self) -> Tensor | None:
        """The values' gradient [nnz, bh, bw]."""
        return self.values.grad

    def __repr__(self) -> str:
        return (
            f"BlockSparseMatrix(shape={tuple(self.shape)}, block_shape={self.block_shape}, nnz={self.pattern.nnz}, "
            f"dtype={self.dtype}, device='{self.device}')"
        )


def strongest_blocks(scores: Tensor, count: int) -> Tensor:
    """bool [R, C]: the ``count`` highest of ``scores`` [R, C]; ties go to the earlier block in row order."""
    order = scores.flatten().float().argsort(descending=True, stable=True)
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[order[:count]] = True
    return mask.view(scores.shape).cpu()


def _choose_pattern(
    dense: Tensor, block_shape: tuple[int, int], count: int | None, blocks: list[tuple[int, int]] | None
) -> BlockPattern:
    shape = tuple(dense.shape)
    if blocks is not None:
        return BlockPattern.from_coords(_coords(blocks), shape, block_shape)
    grid = to_grid(dense.detach(), block_shape)
    if count is None:
        return BlockPattern.from_mask((grid != 0).any(-1).any(-1), block_shape, shape)
    count = check_int("block_count", count, 0, grid.shape[0] * grid.shape[1])
    norms = torch.linalg.vector_norm(grid.double() if grid.dtype == torch.double else grid.float(), dim=(2, 3))
    return BlockPattern.from_mask(strongest_blocks(norms, count), block_shape, shape)


def _coords(blocks: list[tuple[int, int]]) -> Tensor:
    return torch.as_tensor(blocks, dtype=torch.int64, device="cpu").reshape(-1, 2)


__all__ = ["BlockSparseMatrix"]
