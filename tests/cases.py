"""What to try: shapes, blocks, patterns, token counts, dtypes and data. No assertion lives here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from pytorch_block_sparse import BlockPattern

Shape = tuple[int, int]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Patterns: (O, I), (bh, bw) -> BlockPattern


def _grid(shape: Shape, block: Shape) -> Shape:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _random(density: float) -> Callable[[Shape, Shape], BlockPattern]:
    return lambda shape, block: BlockPattern.random(shape, density, block)


def _masked(edit: Callable[[Tensor], Tensor]) -> Callable[[Shape, Shape], BlockPattern]:
    """A pattern from ``edit`` of a random mask of density 1/2."""
    return lambda shape, block: BlockPattern.from_mask(edit(torch.rand(_grid(shape, block)) < 0.5), block, shape)


def _one_full_row(mask: Tensor) -> Tensor:
    mask = torch.zeros_like(mask)
    mask[mask.shape[0] // 2] = True
    mask[0, 0] = True
    return mask


def _power_law_rows(mask: Tensor) -> Tensor:
    """Block row r holds about C / (r + 1) blocks, in random columns."""
    rows, cols = mask.shape
    counts = (cols / torch.arange(1, rows + 1)).ceil()
    return torch.rand(rows, cols).argsort(1) < counts[:, None]


def _empty_rows(mask: Tensor) -> Tensor:
    mask[::2] = False
    return mask


def _empty_columns(mask: Tensor) -> Tensor:
    mask[:, ::2] = False
    return mask


def permuted(pattern: BlockPattern) -> BlockPattern:
    """The same blocks with their slots shuffled."""
    order = torch.randperm(pattern.nnz, device="cpu")  # also under torch.device("meta")
    return pattern.rewire(torch.arange(pattern.nnz, device="cpu"), pattern.block_coords[order])


PATTERNS: dict[str, Callable[[Shape, Shape], BlockPattern]] = {
    "sparse": _random(0.1),
    "half": _random(0.5),
    "full": _masked(torch.ones_like),
    "none": _masked(torch.zeros_like),
    "one-full-row": _masked(_one_full_row),
    "power-law-rows": _masked(_power_law_rows),
    "empty-rows": _masked(_empty_rows),
    "empty-columns": _masked(_empty_columns),
    "permuted": lambda shape, block: permuted(BlockPattern.random(shape, 0.5, block)),
    "banded": lambda shape, block: BlockPattern.banded(shape, block),
    "butterfly": lambda shape, block: BlockPattern.butterfly(shape, block),
    "block-diagonal": lambda shape, block: BlockPattern.block_diagonal(
        shape, block, groups=min(2, *_grid(shape, block))
    ),
}

# Data: a tensor of standard normal values -> the tensor to try

DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda noise: noise,
    "negative": lambda noise: -noise.abs(),
    "skewed": lambda noise: noise.sign() * noise.exp(),
}


@dataclass(frozen=True)
class Case:
    """One problem: W of ``shape`` (O, I) in blocks of ``block``, the pattern's name, T tokens, the data's name."""

    shape: Shape
    block: Shape
    pattern: str = "permuted"
    tokens: int = 33
    data: str = "normal"

    def __str__(self) -> str:
        (rows, cols), (height, width) = self.shape, self.block
        return f"{rows}x{cols}-b{height}x{width}-{self.pattern}-T{self.tokens}-{self.data}"


@dataclass(frozen=True)
class Operands:
    """The tensors of a problem. ``values`` hold NaN past O and I: an operator must not notice."""

    pattern: BlockPattern
    x: Tensor  # [T, I]
    values: Tensor  # [nnz, bh, bw]
    bias: Tensor  # [O]
    dy: Tensor  # [T, O]


def past_edges(pattern: BlockPattern) -> Tensor:
    """bool [nnz, bh, bw] on the CPU: true past O or I."""
    (height, width), (rows, cols) = pattern.block_shape, pattern.block_coords.long().unbind(1)
    row = rows[:, None, None] * height + torch.arange(height)[None, :, None]
    col = cols[:, None, None] * width + torch.arange(width)[None, None, :]
    return (row >= pattern.shape[0]) | (col >= pattern.shape[1])


def make_operands(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu") -> Operands:
    pattern, data = PATTERNS[case.pattern](case.shape, case.block), DATA[case.data]

    def tensor(*sizes: int, scale: float = 1.0) -> Tensor:
        return (data(torch.randn(sizes)) * scale).to(device, dtype)

    values = tensor(pattern.nnz, *case.block, scale=case.shape[1] ** -0.5)
    values[past_edges(pattern).to(device)] = torch.nan
    return Operands(
        pattern, tensor(case.tokens, case.shape[1]), values, tensor(case.shape[0]), tensor(case.tokens, case.shape[0])
    )


# Every block shape with a matrix that it does not divide, and one that it does (a block larger than the matrix aside).
BLOCK_CASES = [
    Case((200, 168), (16, 16)),
    Case((96, 160), (16, 16)),
    Case((200, 168), (32, 32)),
    Case((96, 160), (32, 32)),
    Case((200, 330), (64, 64)),
    Case((192, 128), (64, 64)),
    Case((300, 200), (128, 128)),
    Case((256, 384), (128, 128)),
    Case((100, 200), (16, 64)),
    Case((64, 128), (16, 64)),
    Case((200, 100), (64, 16)),
    Case((60, 300), (8, 128)),
    Case((300, 20), (128, 8)),
    Case((50, 33), (7, 5)),
    Case((49, 35), (7, 5)),
    Case((19, 23), (1, 1)),
    Case((1, 1), (1, 1), "full"),
    Case((40, 1), (3, 4)),
    Case((1, 40), (4, 3)),
    Case((20, 30), (32, 64), "full"),
    Case((20, 70), (256, 32)),
    Case((70, 20), (32, 256)),
]
PATTERN_CASES = [
    Case(shape, block, pattern)
    for shape, block in (((144, 200), (16, 16)), ((160, 256), (32, 32)), ((45, 61), (7, 5)))
    for pattern in PATTERNS
]
TOKEN_CASES = [
    Case((96, 160), block, tokens=tokens)
    for block in ((16, 16), (32, 32), (64, 64))
    for tokens in (0, 1, 2, 3, 5, 8, 17, 64, 100, 257)
]
# A token tile of 256 that is not full, and features that the blocks divide: the Hopper kernels' own way.
TAIL_CASES = [
    Case(shape, block, tokens=tokens)
    for shape, block in (
        ((192, 128), (64, 64)),
        ((256, 384), (128, 128)),
        ((192, 128), (32, 32)),
        ((128, 192), (16, 16)),
    )
    for tokens in (1, 65, 129, 200, 257, 300, 511)
]
DATA_CASES = [
    Case(shape, block, tokens=50, data=data)
    for shape, block in (((200, 168), (16, 16)), ((200, 168), (32, 32)), ((50, 33), (7, 5)))
    for data in ("negative", "skewed")
]
# Longer than any tile or panel of a kernel.
LONG_CASES = [
    Case((640, 1100), (32, 32), "sparse", 300),
    Case((1100, 640), (64, 64), "half", 130),
    Case((80, 4000), (16, 16), "power-law-rows", 70),
    Case((64, 64), (16, 16), "half", 3000),
    *(Case((768, 768), (side, side), "half", 130) for side in (16, 32, 64, 128)),
]
CASES = BLOCK_CASES + PATTERN_CASES + TOKEN_CASES + TAIL_CASES + DATA_CASES + LONG_CASES


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any block shape up to 40, or a square one; grids up to 5 x 5; any edge; up to 70 tokens."""
    side = st.integers(1, 40)
    block = draw(st.sampled_from([(16, 16), (32, 32), (64, 64)]) | st.tuples(side, side))
    shape = tuple(draw(st.integers(1, 5)) * length - draw(st.integers(0, length - 1) | st.just(0)) for length in block)
    return Case(
        shape,
        block,
        draw(st.sampled_from(sorted(PATTERNS))),
        draw(st.integers(0, 70)),
        draw(st.sampled_from(sorted(DATA))),
    )
