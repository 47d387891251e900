"""The Hopper kernels' work lists: built on the CPU, so tested without a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pytorch_block_sparse import BlockPattern
from pytorch_block_sparse.native import block_sparse_native

THREAD_BLOCKS = 132  # kBackThreadBlocks
BLOCK_OUTPUTS = 128  # of a group, computed by one thread block, in two halves
PATTERNS = {
    "random": lambda: BlockPattern.random((768, 512), 0.3, (64, 64)),
    "full": lambda: BlockPattern.random((256, 384), 1.0, (128, 128)),
    "tall blocks": lambda: BlockPattern.random((768, 512), 0.4, (192, 64)),
    "wide blocks": lambda: BlockPattern.random((576, 512), 0.4, (64, 128)),
    "tiles of both orientations": lambda: BlockPattern.random((4096, 4096), 0.25, (128, 128)),
    "one block": lambda: BlockPattern.random((320, 192), nnz=1, block_shape=(64, 64)),
    "no block": lambda: BlockPattern.random((320, 192), nnz=0, block_shape=(64, 64)),
    "ragged edge": lambda: BlockPattern.random((300, 200), 0.5, (64, 64)),
    "slots in disorder": lambda: disordered(),
    "32": lambda: BlockPattern.random((608, 480), 0.3, (32, 32)),
    "32, full": lambda: BlockPattern.random((608, 480), 1.0, (32, 32)),
    "32, no block": lambda: BlockPattern.random((608, 480), nnz=0, block_shape=(32, 32)),
    "96 x 32": lambda: BlockPattern.random((576, 512), 0.3, (96, 32)),
    "32, clusters": lambda: BlockPattern.random((512, 480), 0.5, (32, 32)),
    "32, full, clusters": lambda: BlockPattern.random((768, 256), 1.0, (32, 32)),
    "32, clusters, odd": lambda: BlockPattern.random((2176, 448), 0.4, (32, 32)),
    "96 x 32, clusters": lambda: BlockPattern.random((768, 512), 0.4, (96, 32)),
    "32 x 96, clusters": lambda: BlockPattern.random((512, 768), 0.4, (32, 96)),
    "16": lambda: BlockPattern.random((528, 272), 0.2, (16, 16)),
    "16 x 48": lambda: BlockPattern.random((512, 480), 0.3, (16, 48)),
}


def disordered() -> BlockPattern:
    coords = BlockPattern.random((512, 512), 0.3, (64, 64)).block_coords
    return BlockPattern.from_coords(coords[torch.randperm(len(coords))], (512, 512), (64, 64))


def work_lists(pattern: BlockPattern) -> np.ndarray:
    return torch.ops.pytorch_block_sparse.work_lists(pattern.index(), pattern.geometry).numpy()


def piece_side(pattern: BlockPattern) -> int:
    return next(side for side in (64, 32, 16) if not any(length % side for length in pattern.block_shape))


def cluster_size(pattern: BlockPattern, transposed: bool) -> int:
    """Thread blocks that compute a group, as cluster_size of work_list.cpp says."""
    rows, cols = pattern.grid_shape
    blocks = -(-pattern.shape[transposed] // BLOCK_OUTPUTS)
    dense = 8 * pattern.nnz >= 3 * rows * cols
    return 2 if piece_side(pattern) == 32 and dense and (blocks % 2 == 0 or blocks > 16) else 1


def expected_pieces(pattern: BlockPattern, transposed: bool) -> set[tuple[int, int, int]]:
    """(line, part of the inputs, number) of every piece of a stored block, numbered as sm90_work.h says."""
    side = piece_side(pattern)
    tall, wide = pattern.block_shape[0] // side, pattern.block_shape[1] // side
    pieces = set()
    for slot, (row, col) in enumerate(pattern.block_coords.tolist()):
        for i in range(tall):
            for j in range(wide):
                place = (row * tall + i, col * wide + j)
                pieces.add((*(place[::-1] if transposed else place), (slot * tall + i) * wide + j))
    return pieces


class WorkList:
    """One direction's list, taken apart: groups [2, count, fields], items, pieces, and its length."""

    def __init__(self, work: np.ndarray, pattern: BlockPattern, transposed: bool) -> None:
        self.side = piece_side(pattern)
        grid = [
            length * size // self.side for length, size in zip(pattern.grid_shape, pattern.block_shape, strict=True)
        ]
        self.lines, parts = grid[::-1] if transposed else grid
        stored = pattern.nnz * pattern.block_shape[0] * pattern.block_shape[1] // self.side**2
        self.wide = self.side == 64
        self.pieces_per_row = pattern.block_shape[1] // self.side
        cluster = cluster_size(pattern, transposed)
        self.halves = 2 * cluster
        self.group_lines = cluster * BLOCK_OUTPUTS // self.side
        self.item_chunks = 2 if self.side == 32 else 1
        self.chunk_parts = 4 if self.side == 16 else 1
        count = -(-self.lines // self.group_lines)
        chunks = -(-parts // self.chunk_parts)
        most_items = min(
            (stored + count * (self.item_chunks - 1)) // self.item_chunks, count * -(-chunks // self.item_chunks)
        )
        # {first item, items, (first piece of each half,) first feature of each line}
        self.first_feature = 2 if self.wide else 2 + self.halves
        fields = self.first_feature + self.group_lines
        self.groups = work[: 2 * count * fields].reshape(2, count, fields)
        offset = 2 * count * fields
        # {chunk, piece of each line, unused} or {chunks, mask}
        words = 4 if self.wide else self.item_chunks + 1
        self.items = work[offset : offset + words * most_items].reshape(most_items, words)
        offset += words * most_items
        self.pieces = work[offset : offset + stored]
        self.length = offset if self.wide else -(-(offset + stored + 64) // 4) * 4

    def group_items(self, group: np.ndarray) -> np.ndarray:
        return self.items[group[0] : group[0] + group[1]]

    def group_pieces(self, group: np.ndarray) -> list[tuple[int, int, int]]:
        """(line, part, number) of each piece that a group names."""
        features = group[self.first_feature :].tolist()
        named = self.wide_pieces(group) if self.wide else self.narrow_pieces(group)
        return [(features[line] // self.side, part, number) for line, part, number in named]

    def wide_pieces(self, group: np.ndarray) -> Iterator[tuple[int, int, int]]:
        for chunk, *numbers, _ in self.group_items(group).tolist():
            assert max(numbers) >= 0
            yield from ((line, chunk, number) for line, number in enumerate(numbers) if number >= 0)

    def narrow_pieces(self, group: np.ndarray) -> Iterator[tuple[int, int, int]]:
        half_lines = self.group_lines // self.halves
        half_bits = 32 // self.halves
        for half in range(self.halves):
            position = int(group[2 + half])
            for *chunks, mask in self.group_items(group).tolist():
                assert mask
                for bit in range(half_bits):
                    if mask >> (half_bits * half + bit) & 1:
                        line = half * half_lines + bit % half_lines
                        chunk, part = divmod(bit // half_lines, self.chunk_parts)
                        row, column = divmod(int(self.pieces[position]), self.pieces_per_row * self.side)
                        assert column < self.pieces_per_row
                        yield line, chunks[chunk] * self.chunk_parts + part, row * self.pieces_per_row + column
                        position += 1

    def group_chunks(self, group: np.ndarray) -> list[int]:
        """Every chunk that an item of the group loads."""
        items = self.group_items(group)
        if self.item_chunks == 1:
            return items[:, 0].tolist()
        half_lines, half_bits = self.group_lines // self.halves, 32 // self.halves
        chunk_mask = (1 << self.chunk_parts * half_lines) - 1
        return [
            item[c]
            for item in items.tolist()
            for c in range(2)
            if any(item[2] >> half_bits * half & chunk_mask << c * half_lines for half in range(self.halves))
        ]


def both_lists(pattern: BlockPattern) -> list[WorkList]:
    work = work_lists(pattern)
    assert work.dtype == np.int32
    assert len(work) == block_sparse_native.work_lists_size(pattern.geometry)
    forward = WorkList(work, pattern, transposed=False)
    backward = WorkList(work[forward.length :], pattern, transposed=True)
    return [forward, backward]


@pytest.mark.parametrize("name", PATTERNS)
def test_every_piece_is_listed_once(name):
    pattern = PATTERNS[name]()
    for work, transposed in zip(both_lists(pattern), (False, True), strict=True):
        named = [piece for group in work.groups[0] for piece in work.group_pieces(group)]
        assert len(named) == len(set(named))
        assert set(named) == expected_pieces(pattern, transposed)
        for group in work.groups[0]:
            chunks = work.group_chunks(group)
            assert len(chunks) == len(set(chunks))
            items = work.group_items(group)
            assert len(items) == -(-len(chunks) // work.item_chunks)
            if work.item_chunks == 1 or len(chunks) % 2 == 0:  # else the last item is the odd chunk
                assert (np.diff(items[:, 0]) > 0).all()
        features = sorted(work.groups[0, :, work.first_feature :].ravel().tolist())
        assert features[: work.lines] == [work.side * line for line in range(work.lines)]
        assert all(feature >= work.side * work.lines for feature in features[work.lines :])
        assert sorted(work.groups[0].tolist()) == sorted(work.groups[1].tolist())


def test_longest_groups_come_first_in_the_second_copy():
    mask = torch.rand(64, 64) < torch.linspace(0.02, 0.9, 64)[:, None]
    work = both_lists(BlockPattern.from_mask(mask, (64, 64)))[0]
    lengths = [len(work.group_pieces(group)) for group in work.groups[1]]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("side", "copies", "density"), [(64, 2, 0.2), (32, 4, 0.1), (32, 8, 0.5), (16, 8, 0.2)])
def test_lines_that_share_blocks_are_grouped(side, copies, density):
    line = torch.rand(16, 128) < density
    rows = line.repeat(copies, 1)[torch.randperm(16 * copies)]
    work = both_lists(BlockPattern.from_mask(rows, (side, side)))[0]
    for group in work.groups[0]:
        lines = {}
        for row, part, _ in work.group_pieces(group):
            lines.setdefault(row, set()).add(part)
        assert len({frozenset(parts) for parts in lines.values()}) == 1


def test_pairs_stay_together_beside_a_lone_line():
    mask = torch.zeros(5, 16, dtype=torch.bool)
    mask[0, :2] = mask[2, :2] = True  # a pair
    mask[1, 2:4] = mask[4, 2:4] = True  # another, with nothing in common
    mask[3, 1] = True
    work = both_lists(BlockPattern.from_mask(mask, (32, 32)))[0]
    first, last = (group[work.first_feature :] // 32 for group in work.groups[0])
    assert sorted(map(sorted, (first[:2].tolist(), first[2:].tolist()))) == [[0, 2], [1, 4]]
    assert last[0] == 3


@pytest.mark.parametrize(("side", "share"), [(32, 0.03), (64, 0.01), (128, 0.01)])
@pytest.mark.parametrize("density", [0.5, 0.25, 0.1])
def test_lists_are_small(side, share, density):
    pattern = BlockPattern.random((8192, 8192), density, (side, side))
    assert 4 * len(work_lists(pattern)) <= share * pattern.nnz * side * side * 2


def tile_shape(word: int) -> tuple[bool, int, int, tuple[int, int], int]:
    """(transposed, lines, strips, strips of each warpgroup, first strip of warpgroup 1), BackTileShape::decode."""
    return bool(word & 1), word >> 1 & 7, word >> 4 & 31, (word >> 9 & 15, word >> 13 & 15), word >> 17 & 15


def weight_gradient_lists(pattern: BlockPattern) -> list[np.ndarray]:
    """The list; and that for few tokens, which is right behind it, where there is one."""
    work = work_lists(pattern)[sum(work.length for work in both_lists(pattern)) :]
    pieces = pattern.nnz * math.prod(length // 64 for length in pattern.block_shape)
    if piece_side(pattern) != 64 or pieces > 2 * THREAD_BLOCKS or pieces == 0:
        return [work]
    length = -(-(8 + 4 * pieces) // 4) * 4
    return [work[:-length], work[-length:]]


@pytest.mark.parametrize("name", PATTERNS)
def test_the_weight_gradients_tiles_cover_every_block_once(name):
    pattern = PATTERNS[name]()
    lists = weight_gradient_lists(pattern)
    if pattern.nnz == 0:
        assert sum(map(len, lists)) == 0
        return
    orientations = [check_tiles(work, pattern) for work in lists]
    if piece_side(pattern) != 64:
        assert len(orientations[0]) == 1
    if name == "tiles of both orientations":
        assert len(orientations[0]) == 2


def check_tiles(work: np.ndarray, pattern: BlockPattern) -> set[bool]:
    """Takes a list apart as sm90_back_work.h describes it. Returns the orientations of its tiles."""
    height, width = pattern.block_shape
    piece = 64 if height % 64 == 0 and width % 64 == 0 else 32
    cell = piece if height % 32 == 0 and width % 32 == 0 else 16
    per_strip, per_band = piece // cell, 64 // piece
    tiles, room, most_quads, has_long_stages = work[:4].tolist()
    assert has_long_stages in (0, 1)
    assert not has_long_stages or most_quads <= 2  # what the kernel has code for in longer stages
    covered, orientations = set(), set()
    end = 8 + 2 * tiles
    for offset, word in work[8:end].reshape(tiles, 2).tolist():
        transposed, lines, strips, counts, start = tile_shape(word)
        assert offset == end
        orientations.add(transposed)
        names = work[offset : offset + (lines + strips + 1) // 2].view(np.uint16)[: lines + strips].astype(int)
        end = offset + (lines + strips + 1) // 2
        assert max(counts[0], start + counts[1]) == strips
        for count, first_strip, first_line in ((counts[0], 0, 0), (counts[1], start, lines - per_band)):
            quads = -(-count * piece // 64)
            assert quads <= most_quads
            assert lines + first_strip + quads * 64 // piece <= room
            slots = work[end : end + (64 // cell) * count * per_strip].reshape(64 // cell, count * per_strip)
            end += slots.size
            for along_m, along_n in zip(*np.nonzero(slots >= 0), strict=True):
                m = names[first_line + along_m // per_strip] * per_strip + along_m % per_strip
                n = names[lines + first_strip + along_n // per_strip] * per_strip + along_n % per_strip
                row, col = (n, m) if transposed else (m, n)
                assert (row, col) not in covered
                covered.add((row, col))
                block = pattern.block_coords[slots[along_m, along_n]].tolist()
                assert block == [row * cell // height, col * cell // width]
    assert end <= len(work)
    assert len(covered) == pattern.nnz * (height // cell) * (width // cell)
    return orientations


@pytest.mark.parametrize(
    ("side", "blocks"), [(64, 1), (64, 100), (64, 132), (64, 133), (64, 250), (128, 33), (128, 66)]
)
def test_few_tokens_have_small_tiles(side, blocks):
    """As many thread blocks as can be have work, and each as little as can be."""
    grid = (4096 // side, 4096 // side)
    pattern = BlockPattern.random((4096, 4096), blocks / math.prod(grid), (side, side))
    assert pattern.nnz == blocks
    lists = weight_gradient_lists(pattern)
    assert len(lists) == 2
    check_tiles(lists[1], pattern)
    tiles = lists[1][0]
    pieces = blocks * (side // 64) ** 2
    assert all(sum(tile_shape(word)[3]) <= 1 + (pieces > THREAD_BLOCKS) for word in lists[1][9 : 8 + 2 * tiles : 2])
    assert tiles <= THREAD_BLOCKS
    assert lists[1][3] == (pieces <= THREAD_BLOCKS or side == 128)  # TileList::stage


def tile_cost(word: int, piece: int) -> float:
    """Nanoseconds a token: back_token_ns of sm90_back_work.h."""
    _, lines, strips, counts, _ = tile_shape(word)
    quads = sum(-(-count * piece // 64) for count in counts)
    return max(1.44 * quads, (1.26 if piece == 64 else 0.77) * (lines + strips), 4)


@pytest.mark.parametrize("side", [32, 64])
def test_the_weight_gradients_waves_have_tiles_of_like_cost(side):
    pattern = BlockPattern.random((8192, 8192), 0.25, (side, side))
    work = weight_gradient_lists(pattern)[0]
    costs = [tile_cost(word, side) for word in work[9 : 8 + 2 * work[0] : 2].tolist()]
    waves = [costs[first : first + THREAD_BLOCKS] for first in range(0, len(costs), THREAD_BLOCKS)]
    rounding = 0.011  # tiles are sorted by hundredths
    assert len(waves) > 2
    for wave, following in itertools.pairwise(waves):
        assert min(wave) >= max(following) - rounding
    assert waves[-1][0] >= max(waves[-1]) - rounding  # what the kernel cuts the last wave by
    if side == 32:  # and thread blocks of like loads: as far apart as two tiles of one wave
        loads = [sum(wave[i] for wave in waves if len(wave) == THREAD_BLOCKS) for i in range(THREAD_BLOCKS)]
        assert max(loads) - min(loads) <= max(max(wave) - min(wave) for wave in waves) + rounding
        assert loads[0] <= min(loads) + rounding * len(waves)


@pytest.mark.parametrize("side", [64, 128])
def test_the_weight_gradients_waves_are_full(side):
    """Every thread block takes as long as the slowest of its wave: with tiles as even as these, little is lost."""
    pattern = BlockPattern.random((14336, 4096), 0.25, (side, side))
    work = weight_gradient_lists(pattern)[0]
    quads = [sum(tile_shape(word)[3]) for word in work[9 : 8 + 2 * work[0] : 2].tolist()]
    waves = [quads[first : first + THREAD_BLOCKS] for first in range(0, len(quads), THREAD_BLOCKS)]
    assert sum(quads) == pattern.nnz * (side // 64) ** 2
    assert sum(quads) >= 0.93 * THREAD_BLOCKS * sum(map(max, waves))


def test_blocks_without_a_hopper_kernel_have_no_list():
    pattern = BlockPattern.random((96, 96), 0.5, (24, 24))
    assert len(work_lists(pattern)) == 0
