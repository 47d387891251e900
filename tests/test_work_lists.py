"""The Hopper kernels' work lists: built on the CPU, so tested without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorch_block_sparse import BlockPattern
from pytorch_block_sparse.native import block_sparse_native

SIDE = 64  # of a piece, and outputs of a line
PATTERNS = {
    "random": lambda: BlockPattern.random((768, 512), 0.3, (64, 64)),
    "full": lambda: BlockPattern.random((256, 384), 1.0, (128, 128)),
    "tall blocks": lambda: BlockPattern.random((768, 512), 0.4, (192, 64)),
    "wide blocks": lambda: BlockPattern.random((576, 512), 0.4, (64, 128)),
    "one block": lambda: BlockPattern.random((320, 192), nnz=1, block_shape=(64, 64)),
    "no block": lambda: BlockPattern.random((320, 192), nnz=0, block_shape=(64, 64)),
    "ragged edge": lambda: BlockPattern.random((300, 200), 0.5, (64, 64)),
    "slots in disorder": lambda: disordered(),
}


def disordered() -> BlockPattern:
    coords = BlockPattern.random((512, 512), 0.3, (64, 64)).block_coords
    return BlockPattern.from_coords(coords[torch.randperm(len(coords))], (512, 512), (64, 64))


def work_lists(pattern: BlockPattern) -> np.ndarray:
    return torch.ops.pytorch_block_sparse.work_lists(pattern.index(), pattern.geometry).numpy()


def expected_pieces(pattern: BlockPattern, transposed: bool) -> set[tuple[int, int, int]]:
    """(line, chunk, piece) of every 64 x 64 part of a stored block; sm90_work.h numbers the pieces."""
    tall, wide = pattern.block_shape[0] // SIDE, pattern.block_shape[1] // SIDE
    pieces = set()
    for slot, (row, col) in enumerate(pattern.block_coords.tolist()):
        for i in range(tall):
            for j in range(wide):
                place = (row * tall + i, col * wide + j)
                pieces.add((*(place[::-1] if transposed else place), (slot * tall + i) * wide + j))
    return pieces


def read_list(work: np.ndarray) -> tuple[list[list[int]], set[tuple[int, int, int]], int]:
    """A list's groups in raster order, the pieces it names, and its length in int32 elements."""
    count = work[0]
    groups = work[4 : 4 + 8 * count].reshape(2, count, 4)
    items = work[4 + 8 * count :]
    assert sorted(groups[0].tolist()) == sorted(groups[1].tolist())
    pieces, named, used = set(), 0, 0
    for first, length, *features in groups[0].tolist():
        chunks = set()
        for chunk, *numbers, unused in items[4 * first : 4 * (first + length)].reshape(-1, 4).tolist():
            assert unused == 0
            assert chunk not in chunks
            chunks.add(chunk)
            assert max(numbers) >= 0
            for feature, number in zip(features, numbers, strict=True):
                if number >= 0:
                    pieces.add((feature // SIDE, chunk, number))
                    named += 1
        used += length
    assert named == len(pieces)
    return groups[0].tolist(), pieces, used


@pytest.mark.parametrize("name", PATTERNS)
def test_every_piece_is_listed_once(name):
    pattern = PATTERNS[name]()
    work = work_lists(pattern)
    assert work.dtype == np.int32
    assert len(work) == block_sparse_native.work_lists_size(pattern.geometry)
    # The forward list comes first; the other begins where the first one's room ends, which its size tells.
    rows, cols = pattern.grid_shape
    tall, wide = pattern.block_shape[0] // SIDE, pattern.block_shape[1] // SIDE
    offset = 0
    for transposed, lines, chunks in ((False, rows * tall, cols * wide), (True, cols * wide, rows * tall)):
        groups, pieces, _ = read_list(work[offset:])
        assert pieces == expected_pieces(pattern, transposed)
        features = sorted(feature for group in groups for feature in group[2:])
        assert features[:lines] == [SIDE * line for line in range(lines)]
        assert all(feature >= SIDE * lines for feature in features[lines:])
        count = -(-lines // 2)
        offset += 4 + 8 * count + 4 * min(pattern.nnz * tall * wide, count * chunks)
    assert offset == len(work)


def test_longest_groups_come_first_in_the_second_copy():
    mask = torch.rand(64, 64) < torch.linspace(0.02, 0.9, 64)[:, None]
    pattern = BlockPattern.from_mask(mask, (64, 64))
    work = work_lists(pattern)
    count = work[0]
    groups = work[4 : 4 + 8 * count].reshape(2, count, 4)[1]
    items = work[4 + 8 * count :].reshape(-1, 4)
    lengths = [(items[first : first + length, 1:3] >= 0).sum() for first, length, *_ in groups]
    assert lengths == sorted(lengths, reverse=True)


def test_lines_that_share_blocks_are_paired():
    lines = torch.rand(16, 64) < 0.2
    pattern = BlockPattern.from_mask(torch.cat((lines, lines[torch.randperm(16)])), (64, 64))
    groups, _, items = read_list(work_lists(pattern))
    assert items == lines.sum()  # every item serves both lines
    assert len(groups) == 16


@pytest.mark.parametrize(("side", "share"), [(64, 0.01), (128, 0.01)])
@pytest.mark.parametrize("density", [0.5, 0.1, 0.01])
def test_lists_are_small(side, share, density):
    pattern = BlockPattern.random((8192, 8192), density, (side, side))
    assert 4 * len(work_lists(pattern)) <= share * pattern.nnz * side * side * 2


def test_blocks_without_a_hopper_kernel_have_no_list():
    pattern = BlockPattern.random((96, 96), 0.5, (24, 24))
    assert len(work_lists(pattern)) == 0
