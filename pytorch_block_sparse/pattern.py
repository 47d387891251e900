"""BlockPattern: which blocks of a matrix are stored, and the indices that the kernels walk."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .checks import INT32_MAX, check_int, check_integers, check_mask, check_pair, check_share
from .errors import BlockSparseError
from .pattern_index import PatternIndex, build_packed_index, copy_to_device, unpack_index
from .plotting import draw_blocks, new_figure

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# Below this many grid cells a random pattern is cut from one permutation; above it, drawn by rejection.
_PERMUTATION_LIMIT = 2**26


def on_cpu(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Makes new tensors on the CPU, also under ``with torch.device("meta")``: patterns always hold data."""

    @functools.wraps(function)
    def wrapper(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return wrapper


def blocks_at_density(density: float, cells: int) -> int:
    """round(density * cells), at least one block.

    Raises:
        BlockSparseError: density is no number in (0, 1].
    """
    check_share("density", density)
    return max(1, round(density * cells))


def block_grid(shape: tuple[int, int], block_shape: tuple[int, int]) -> tuple[int, int]:
    """The block grid (R, C) that covers ``shape``; edge blocks may reach past it."""
    return -(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1])


class BlockPattern:
    """The support of a block-sparse matrix W of shape (O, I): the coordinates of its stored blocks and their indices.

    Immutable. A *slot* is a block's place in ``values`` [nnz, bh, bw]; slots are in row order in a fresh pattern, and
    any order after :meth:`rewire` or :meth:`rebuild`, which never move a kept block. Build one with a constructor:
    :meth:`random`, :meth:`banded`, :meth:`block_diagonal`, :meth:`butterfly`, :meth:`from_mask`, :meth:`from_coords`.

    The named index arrays are on the CPU; :meth:`index` gives the packed index on any device, copied there once.

    Attributes:
        shape: (O, I), the matrix.
        block_shape: (bh, bw), a block.
        grid_shape: (R, C) = (ceil(O / bh), ceil(I / bw)), the grid of blocks.
        nnz: stored blocks.

    >>> pattern = BlockPattern.from_mask(torch.tensor([[True, False], [True, True]]), block_shape=(16, 16))
    >>> pattern
    BlockPattern(shape=(32, 32), block_shape=(16, 16), nnz=3, density=0.75)
    >>> pattern.crow_indices.tolist(), pattern.col_indices.tolist()
    ([0, 1, 3], [0, 0, 1])
    """

    __slots__ = ("__weakref__", "_by_device", "_packed", "block_shape", "grid_shape", "nnz", "shape")

    shape: tuple[int, int]
    block_shape: tuple[int, int]
    grid_shape: tuple[int, int]
    nnz: int

    @on_cpu
    def __init__(self, block_coords: Tensor, shape: tuple[int, int], block_shape: tuple[int, int]) -> None:
        shape, block_shape = check_pair("shape", shape), check_pair("block_shape", block_shape)
        grid = block_grid(shape, block_shape)
        # Ordinary tensors also under torch.inference_mode(): they carry the version counter that index() checks.
        with torch.inference_mode(False), torch.no_grad():
            packed = build_packed_index(block_coords, grid)
        for name, value in (
            ("shape", shape),
            ("block_shape", block_shape),
            ("grid_shape", grid),
            ("nnz", int(block_coords.shape[0])),
            ("_packed", packed),
            ("_by_device", {packed.device: packed}),
        ):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"BlockPattern is immutable: cannot set {name}; use rewire() or rebuild()")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"BlockPattern is immutable: cannot delete {name}")

    # Constructors

    @classmethod
    @on_cpu
    def from_coords(cls, block_coords: Tensor, shape: tuple[int, int], block_shape: tuple[int, int]) -> BlockPattern:
        """A pattern from the (block row, block column) of every slot.

        Args:
            block_coords: integers [nnz, 2], in slot order, without duplicates.
            shape: (O, I).
            block_shape: (bh, bw).

        Raises:
            BlockSparseError: a coordinate is out of range or stands twice, or a count does not fit int32.
        """
        return cls(block_coords, shape, block_shape)

    @classmethod
    @on_cpu
    def from_mask(
        cls, mask: Tensor, block_shape: tuple[int, int], shape: tuple[int, int] | None = None
    ) -> BlockPattern:
        """A pattern from a bool grid.

        Args:
            mask: bool [R, C] (tensor, NumPy array or nested lists), true where a block is stored.
            block_shape: (bh, bw).
            shape: (O, I); (R * bh, C * bw) if not given.
        """
        block_shape = check_pair("block_shape", block_shape)
        mask = check_mask("mask", mask)
        if shape is None:
            shape = (mask.shape[0] * block_shape[0], mask.shape[1] * block_shape[1])
        shape = check_pair("shape", shape)
        grid = block_grid(shape, block_shape)
        if tuple(mask.shape) != grid:
            raise BlockSparseError(
                f"mask must be the block grid {grid} of shape {shape} in blocks of {block_shape}, "
                f"got {tuple(mask.shape)}"
            )
        return cls(mask.nonzero(), shape, block_shape)

    @classmethod
    @on_cpu
    def random(
        cls,
        shape: tuple[int, int],
        density: float | None = None,
        block_shape: tuple[int, int] = (32, 32),
        *,
        nnz: int | None = None,
        generator: torch.Generator | None = None,
    ) -> BlockPattern:
        """Blocks drawn uniformly without replacement; follows ``torch.manual_seed``.

        Args:
            shape: (O, I).
            density: share of the blocks to store, in (0, 1]: round(density * R * C), at least one.
            block_shape: (bh, bw).
            nnz: the number of stored blocks, instead of ``density``.
            generator: CPU generator to draw from.
        """
        shape, block_shape = check_pair("shape", shape), check_pair("block_shape", block_shape)
        grid = block_grid(shape, block_shape)
        cells = grid[0] * grid[1]
        if (density is None) == (nnz is None):
            raise BlockSparseError("give exactly one of density and nnz")
        if nnz is None:
            nnz = blocks_at_density(density, cells)
        nnz = check_int("nnz", nnz, 0, min(cells, INT32_MAX))
        return cls(_unravel(_sample(cells, nnz, generator), grid[1]), shape, block_shape)

    @classmethod
    @on_cpu
    def banded(
        cls, shape: tuple[int, int], block_shape: tuple[int, int] = (32, 32), *, bandwidth: int = 1
    ) -> BlockPattern:
        """The blocks within ``bandwidth`` blocks of the diagonal, which is stretched if the grid is not square."""
        shape, block_shape = check_pair("shape", shape), check_pair("block_shape", block_shape)
        bandwidth = check_int("bandwidth", bandwidth, 0)
        rows, cols = block_grid(shape, block_shape)
        band = (torch.arange(cols) - (torch.arange(rows) * cols // rows)[:, None]).abs() <= bandwidth
        if rows < cols:
            # A narrow band steps over columns of a wide grid: each gets its block of the diagonal.
            band |= torch.arange(rows)[:, None] == torch.arange(cols) * rows // cols
        return cls.from_mask(band, block_shape, shape)

    @classmethod
    @on_cpu
    def block_diagonal(
        cls, shape: tuple[int, int], block_shape: tuple[int, int] = (32, 32), *, groups: int
    ) -> BlockPattern:
        """``groups`` dense groups along the diagonal, as in a grouped linear layer, of nearly equal size."""
        shape, block_shape = check_pair("shape", shape), check_pair("block_shape", block_shape)
        rows, cols = block_grid(shape, block_shape)
        groups = check_int("groups", groups, 1, min(rows, cols))
        row_group = torch.arange(rows) * groups // rows
        col_group = torch.arange(cols) * groups // cols
        return cls.from_mask(row_group[:, None] == col_group, block_shape, shape)

    @classmethod
    @on_cpu
    def butterfly(
        cls, shape: tuple[int, int], block_shape: tuple[int, int] = (32, 32), *, max_stride: int | None = None
    ) -> BlockPattern:
        """The flat block butterfly: block (r, c) is stored where r = c or r xor c is a power of two <= ``max_stride``.

        A grid that is not square is the square butterfly of its longer side, folded onto the shorter.

        Source: Dao et al., "Pixelated Butterfly: Simple and Efficient Sparse Training for Neural Network Models",
        2021, arXiv:2112.00029.
        """
        shape, block_shape = check_pair("shape", shape), check_pair("block_shape", block_shape)
        if max_stride is not None:
            max_stride = check_int("max_stride", max_stride, 0)
        rows, cols = block_grid(shape, block_shape)
        side = max(rows, cols)
        strides = [0] + [1 << k for k in range(side.bit_length()) if max_stride is None or 1 << k <= max_stride]
        long_index = torch.arange(side).repeat(len(strides))
        partner = long_index ^ torch.tensor(strides).repeat_interleave(side)
        inside = partner < side
        first, second = long_index[inside], partner[inside]
        key = torch.unique((first * rows // side) * cols + second * cols // side)
        return cls(_unravel(key, cols), shape, block_shape)

    # Changing a pattern

    @on_cpu
    def rewire(self, slots: Tensor, block_coords: Tensor) -> BlockPattern:
        """This pattern with some blocks moved: nnz stays, and the other blocks keep their slots.

        Args:
            slots: integers [n], the slots that move.
            block_coords: integers [n, 2], the new (block row, block column) of each.
        """
        slots = check_integers("slots", slots, 1)
        coords = check_integers("block_coords", block_coords, 2)
        if coords.shape != (slots.shape[0], 2):
            raise BlockSparseError(f"block_coords must be [{slots.shape[0]}, 2] as slots, got {list(coords.shape)}")
        if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= self.nnz):
            raise BlockSparseError(
                f"slots must be from 0 to {self.nnz - 1}, got {int(slots.min())} to {int(slots.max())}"
            )
        if torch.unique(slots).numel() != slots.numel():
            raise BlockSparseError("slots must not name a slot twice")
        moved = self.block_coords.long()
        moved[slots] = coords
        return BlockPattern(moved, self.shape, self.block_shape)

    @on_cpu
    def rebuild(self, mask: Tensor) -> BlockPattern:
        """The pattern of ``mask`` (bool [R, C], same number of blocks), in which kept blocks keep their slots.

        New blocks, in row order, take the free slots in ascending order.
        """
        mask = check_mask("mask", mask)
        if tuple(mask.shape) != self.grid_shape:
            raise BlockSparseError(f"mask must be the block grid {self.grid_shape}, got {tuple(mask.shape)}")
        if int(mask.sum()) != self.nnz:
            raise BlockSparseError(f"mask must keep nnz = {self.nnz} blocks, got {int(mask.sum())}; see from_mask()")
        rows, cols = self.block_coords.long().unbind(1)
        free = (~mask[rows, cols]).nonzero()[:, 0]
        fresh = mask.clone()
        fresh[rows, cols] = False
        return self.rewire(free, fresh.nonzero())

    # Reading a pattern

    def index(self, device: torch.device | str = "cpu") -> Tensor:
        """The packed index on ``device``: int32, one copy a device, shared by every user of the pattern.

        Raises:
            BlockSparseError: somebody wrote into an index array.
        """
        device = torch.device(device)
        packed = self._by_device.get(device)
        if packed is None:
            with torch.inference_mode(False), torch.no_grad():
                packed = copy_to_device(self._packed, self.geometry, device)
            # "cuda" and "cuda:0" name one device: the key is the device that the tensor reports.
            packed = self._by_device.setdefault(packed.device, packed)
        if not torch.compiler.is_compiling() and packed._version != 0:
            raise BlockSparseError("the index arrays of a BlockPattern are immutable, but one was written to")
        return packed

    def arrays(self, device: torch.device | str = "cpu") -> PatternIndex:
        """The named index arrays on ``device``, views of :meth:`index`."""
        return unpack_index(self.index(device), *self.grid_shape, self.nnz)

    @property
    def crow_indices(self) -> Tensor:
        """int32 [R + 1]: block row r holds the entries crow_indices[r] to crow_indices[r + 1] of the row-wise index."""
        return self.arrays().crow_indices

    @property
    def col_indices(self) -> Tensor:
        """int32 [nnz]: block column of each entry of the row-wise index, ascending within a row."""
        return self.arrays().col_indices

    @property
    def row_slots(self) -> Tensor:
        """int32 [nnz]: slot of each entry of the row-wise index."""
        return self.arrays().row_slots

    @property
    def ccol_indices(self) -> Tensor:
        """int32 [C + 1]: block column c holds the entries ccol_indices[c] to ccol_indices[c + 1], column-wise."""
        return self.arrays().ccol_indices

    @property
    def row_indices(self) -> Tensor:
        """int32 [nnz]: block row of each entry of the column-wise index, ascending within a column."""
        return self.arrays().row_indices

    @property
    def col_slots(self) -> Tensor:
        """int32 [nnz]: slot of each entry of the column-wise index."""
        return self.arrays().col_slots

    @property
    def block_coords(self) -> Tensor:
        """int32 [nnz, 2]: (block row, block column) of each slot."""
        return self.arrays().block_coords

    @property
    def density(self) -> float:
        """Stored blocks over all blocks of the grid."""
        return self.nnz / (self.grid_shape[0] * self.grid_shape[1])

    @property
    def geometry(self) -> list[int]:
        """[O, I, bh, bw, nnz]: the static integers of every operator call."""
        return [*self.shape, *self.block_shape, self.nnz]

    @on_cpu
    def in_row_order(self) -> bool:
        """Whether slots are in row order, so that ``values`` are the values of a BSR tensor as they stand."""
        return torch.equal(self.row_slots, torch.arange(self.nnz, dtype=torch.int32))

    @on_cpu
    def mask(self) -> Tensor:
        """bool [R, C] on the CPU: true where a block is stored."""
        mask = torch.zeros(self.grid_shape, dtype=torch.bool)
        rows, cols = self.block_coords.long().unbind(1)
        mask[rows, cols] = True
        return mask

    def stored_elements(self) -> int:
        """Elements of W in stored blocks; what an edge block holds past O or I does not count."""
        rows, cols = self.block_coords.long().unbind(1)
        heights = (self.shape[0] - rows * self.block_shape[0]).clamp_(max=self.block_shape[0])
        widths = (self.shape[1] - cols * self.block_shape[1]).clamp_(max=self.block_shape[1])
        return int((heights * widths).sum())

    def plot(self, path: str | os.PathLike[str] | None = None, axes: Any = None) -> Any:
        """Draws the block grid, stored blocks in colour.

        Args:
            path: write an image there; the suffix chooses the format.
            axes: matplotlib axes to draw on; those of a new figure if not given.

        Returns:
            The axes.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        if axes is None:
            axes = new_figure().subplots()
        draw_blocks(axes, self.mask(), f"{self.shape} in blocks of {self.block_shape}, density {self.density:.4g}")
        if path is not None:
            axes.figure.savefig(path, dpi=120)
        return axes

    @on_cpu
    def validate(self) -> None:
        """Checks every index array against the coordinates.

        Raises:
            BlockSparseError: the arrays contradict each other or the shapes, on any device the pattern is cached on.
        """
        for device, packed in self._by_device.items():
            if packed.is_meta:
                continue  # holds no data
            coords = unpack_index(packed, *self.grid_shape, self.nnz).block_coords
            expected = build_packed_index(coords.cpu(), self.grid_shape)
            if not torch.equal(packed.cpu(), copy_to_device(expected, self.geometry, device).cpu()):
                raise BlockSparseError(f"the pattern's index arrays on {device} contradict its block_coords")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockPattern):
            return NotImplemented
        return (self.shape, self.block_shape, self.nnz) == (other.shape, other.block_shape, other.nnz) and torch.equal(
            self.block_coords, other.block_coords
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.block_shape, self.nnz))

    def __repr__(self) -> str:
        return (
            f"BlockPattern(shape={self.shape}, block_shape={self.block_shape}, nnz={self.nnz}, "
            f"density={self.density:.4g})"
        )

    def __copy__(self) -> BlockPattern:
        return self

    def __deepcopy__(self, memo: dict) -> BlockPattern:
        return self

    def __reduce__(self) -> tuple:
        # The coordinates alone, as a tensor of their own: a view would pickle the whole packed index.
        return BlockPattern, (self.block_coords.clone(), self.shape, self.block_shape)


def _unravel(keys: Tensor, cols: int) -> Tensor:
    """Flat grid positions [n] -> coordinates [n, 2]."""
    return torch.stack((keys // cols, keys % cols), 1)


def _sample(cells: int, count: int, generator: torch.Generator | None) -> Tensor:
    """``count`` of ``cells`` positions, uniformly without replacement, ascending."""
    if cells <= _PERMUTATION_LIMIT:
        return torch.randperm(cells, generator=generator)[:count].sort()[0]
    if 2 * count > cells:
        raise BlockSparseError(
            f"density must be at most 0.5 for a random pattern of {cells} blocks, got {count / cells:.3g}"
        )
    # Draw with replacement, drop what was drawn before, repeat; in order of first appearance, so that cutting the
    # surplus leaves the sample uniform.
    keys = torch.empty(0, dtype=torch.int64)
    while keys.numel() < count:
        drawn = torch.randint(cells, (2 * (count - keys.numel()) + 64,), generator=generator)
        keys = torch.cat((keys, drawn))
        ordered, order = keys.sort(stable=True)
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]
        keys = keys[order[first].sort()[0]]
    return keys[:count].sort()[0]


__all__ = ["BlockPattern"]
