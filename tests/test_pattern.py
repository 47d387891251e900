"""BlockPattern: what it stores, that it never changes, and every way to make one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import scipy.sparse
import torch
from cases import PATTERNS, Case, cases, permuted
from hypothesis import given

from pytorch_block_sparse import BlockPattern, BlockSparseError
from pytorch_block_sparse.pattern_input import as_pattern

INDEX_ARRAYS = (
    "crow_indices",
    "col_indices",
    "row_slots",
    "ccol_indices",
    "row_indices",
    "col_slots",
    "block_coords",
)


def naive_index(pattern: BlockPattern) -> dict[str, list]:
    """Every index array, by a loop over the coordinates of the slots."""
    coords = pattern.block_coords.tolist()
    result: dict[str, list] = {name: [] for name in INDEX_ARRAYS}
    result["block_coords"] = coords
    for lines, offsets, others, slots, axis in (
        (pattern.grid_shape[0], "crow_indices", "col_indices", "row_slots", 0),
        (pattern.grid_shape[1], "ccol_indices", "row_indices", "col_slots", 1),
    ):
        result[offsets].append(0)
        for line in range(lines):
            entries = sorted((coord[1 - axis], slot) for slot, coord in enumerate(coords) if coord[axis] == line)
            result[others] += [other for other, _ in entries]
            result[slots] += [slot for _, slot in entries]
            result[offsets].append(len(result[others]))
    return result


def assert_index_is_right(pattern: BlockPattern) -> None:
    for name, expected in naive_index(pattern).items():
        array = getattr(pattern, name)
        assert array.dtype == torch.int32 and array.tolist() == expected, name
    index = pattern.arrays()
    for order, offsets in ((index.row_order, index.crow_indices), (index.col_order, index.ccol_indices)):
        lengths = offsets.diff().tolist()
        assert order.tolist() == sorted(range(len(lengths)), key=lambda line: -lengths[line])  # stable
    pattern.validate()


def stored(pattern: BlockPattern) -> set[tuple[int, int]]:
    return {tuple(coord) for coord in pattern.block_coords.tolist()}


@given(case=cases())
def test_index_arrays(case):
    assert_index_is_right(PATTERNS[case.pattern](case.shape, case.block))


@given(case=cases())
def test_coordinates_are_the_mask(case):
    pattern = PATTERNS[case.pattern](case.shape, case.block)
    mask = pattern.mask()
    assert mask.shape == pattern.grid_shape
    assert stored(pattern) == {tuple(place) for place in mask.nonzero().tolist()}
    assert pattern.nnz == int(mask.sum()) == len(stored(pattern))


@given(case=cases())
def test_stored_elements(case):
    pattern = PATTERNS[case.pattern](case.shape, case.block)
    elements = pattern.mask().repeat_interleave(case.block[0], 0).repeat_interleave(case.block[1], 1)
    assert pattern.stored_elements() == int(elements[: case.shape[0], : case.shape[1]].sum())


@pytest.mark.parametrize("name", INDEX_ARRAYS)
def test_arrays_are_aligned_views_of_one_tensor(name):
    pattern = BlockPattern.random((75, 90), 0.4, (5, 7))
    packed, array = pattern.index(), getattr(pattern, name)
    assert packed.dtype == torch.int32 and packed.is_contiguous() and packed.dim() == 1
    assert array.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    assert array.data_ptr() % 16 == 0


def test_attributes():
    pattern = BlockPattern.random((75, 90), 0.4, (5, 7))
    assert (pattern.shape, pattern.block_shape, pattern.grid_shape) == ((75, 90), (5, 7), (15, 13))
    assert pattern.nnz == 78 and pattern.density == pytest.approx(0.4)
    assert list(pattern.geometry) == [75, 90, 5, 7, 78]


# Constructors


@pytest.mark.parametrize(
    ("density", "expected"),
    [(1.0, 15), (1, 15), (0.5, 8), (0.1, 2), (0.09, 1), (1e-9, 1), (0.3, 4), (0.34, 5)],
    ids=str,
)
def test_density_keeps_the_rounded_number_of_blocks_and_at_least_one(density, expected):
    assert BlockPattern.random((30, 50), density, (10, 10)).nnz == expected


@pytest.mark.parametrize("nnz", [0, 1, 7, 15])
def test_random_with_a_number_of_blocks(nnz):
    assert BlockPattern.random((30, 50), block_shape=(10, 10), nnz=nnz).nnz == nnz


def test_random_follows_the_seed_and_a_generator():
    def draw(seed: int, **kwargs) -> BlockPattern:
        torch.manual_seed(seed)
        return BlockPattern.random((320, 320), 0.3, (16, 16), **kwargs)

    assert draw(1) == draw(1) != draw(2)
    with_generator = [draw(seed, generator=torch.Generator().manual_seed(5)) for seed in (1, 2)]
    assert with_generator[0] == with_generator[1]


def test_random_is_uniform():
    torch.manual_seed(0)
    counts = sum(BlockPattern.random((4, 5), 0.25, (1, 1)).mask().int() for _ in range(1000))
    assert (counts - 250).abs().max() < 75  # more than five standard deviations of 14


def test_random_on_a_grid_too_large_to_permute():
    pattern = BlockPattern.random((2**20, 2**20), block_shape=(16, 16), nnz=5000)
    assert pattern.nnz == 5000 and pattern.grid_shape == (2**16, 2**16)
    pattern.validate()
    rows = pattern.block_coords[:, 0].double()
    assert abs(rows.mean() / 2**15 - 1) < 0.05


@pytest.mark.parametrize(("grid", "bandwidth"), [((6, 6), 0), ((6, 6), 1), ((6, 6), 5), ((4, 9), 1), ((9, 4), 1)])
def test_banded(grid, bandwidth):
    pattern = BlockPattern.banded((grid[0] * 8, grid[1] * 8), (8, 8), bandwidth=bandwidth)
    rows, cols = grid
    band = {(r, c) for r in range(rows) for c in range(cols) if abs(r * cols // rows - c) <= bandwidth}
    diagonal = {(c * rows // cols, c) for c in range(cols)} if cols > rows else set()
    assert stored(pattern) == band | diagonal
    mask = pattern.mask()
    assert mask.any(0).all() and mask.any(1).all()


@pytest.mark.parametrize(("grid", "groups"), [((6, 6), 3), ((6, 6), 1), ((7, 5), 2), ((3, 9), 3)])
def test_block_diagonal(grid, groups):
    pattern = BlockPattern.block_diagonal((grid[0] * 8, grid[1] * 8), (8, 8), groups=groups)
    expected = {
        (r, c) for r in range(grid[0]) for c in range(grid[1]) if r * groups // grid[0] == c * groups // grid[1]
    }
    assert stored(pattern) == expected
    sizes = pattern.mask().sum(1).unique()
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(("side", "max_stride"), [(8, None), (8, 2), (8, 0), (7, None), (1, None)])
def test_butterfly(side, max_stride):
    pattern = BlockPattern.butterfly((side * 4, side * 4), (4, 4), max_stride=max_stride)
    powers = {0} | {2**k for k in range(10) if max_stride is None or 2**k <= max_stride}
    assert stored(pattern) == {(r, c) for r in range(side) for c in range(side) if r ^ c in powers}


@pytest.mark.parametrize("grid", [(4, 8), (8, 3)])
def test_butterfly_off_the_square_covers_rows_and_columns(grid):
    mask = BlockPattern.butterfly((grid[0] * 4, grid[1] * 4), (4, 4)).mask()
    assert mask.any(0).all() and mask.any(1).all() and not mask.all()


def test_from_coords_keeps_slot_order():
    coords = torch.tensor([[2, 1], [0, 0], [2, 0], [1, 3]])
    pattern = BlockPattern.from_coords(coords, (23, 30), (8, 8))
    assert pattern.block_coords.tolist() == coords.tolist()
    assert not pattern.in_row_order()
    assert_index_is_right(pattern)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_from_coords_takes_any_integer_dtype(dtype):
    pattern = BlockPattern.from_coords(torch.tensor([[1, 0], [0, 1]], dtype=dtype), (16, 16), (8, 8))
    assert pattern.block_coords.tolist() == [[1, 0], [0, 1]]


def test_from_coords_does_not_keep_the_callers_tensor():
    coords = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
    pattern = BlockPattern.from_coords(coords, (16, 16), (8, 8))
    coords.fill_(7)
    pattern.validate()
    assert pattern.block_coords.tolist() == [[1, 0], [0, 1]]


def test_from_mask_is_in_row_order():
    pattern = BlockPattern.from_mask(torch.rand(6, 7) < 0.5, (4, 4), (23, 27))
    assert pattern.in_row_order() and pattern.shape == (23, 27)
    assert pattern.block_coords.tolist() == sorted(pattern.block_coords.tolist())


def test_a_million_blocks_without_a_loop():
    """A Python loop over the blocks would call PyTorch at least once for each."""
    calls = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal calls
            calls += 1
            return function(*args, **(kwargs or {}))

    with Count():
        pattern = BlockPattern.random((32_000, 64_000), 0.5, (32, 32))
    assert pattern.nnz == 1_000_000 and calls < 200
    pattern.validate()


# as_pattern

MASK = torch.tensor([[True, False, True], [False, False, True]])

SOURCES: dict[str, Callable[[], object]] = {
    "bool-grid": lambda: MASK,
    "numpy-grid": lambda: MASK.numpy(),
    "list": MASK.tolist,
    "pattern": lambda: BlockPattern.from_mask(MASK, (4, 2)),
    "bsr": lambda: MASK.float().repeat_interleave(4, 0).repeat_interleave(2, 1).to_sparse_bsr((4, 2)),
    "scipy-bsr": lambda: scipy.sparse.bsr_matrix(MASK.numpy().repeat(4, 0).repeat(2, 1), blocksize=(4, 2)),
    "scipy-bsr-array": lambda: scipy.sparse.bsr_array(MASK.numpy().repeat(4, 0).repeat(2, 1), blocksize=(4, 2)),
    "scipy-csr": lambda: scipy.sparse.csr_matrix(MASK.numpy().repeat(4, 0).repeat(2, 1)),
    "scipy-coo": lambda: scipy.sparse.coo_array(MASK.numpy().repeat(4, 0).repeat(2, 1)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_as_pattern(source):
    pattern = as_pattern(SOURCES[source](), (8, 6), (4, 2))
    assert (pattern.shape, pattern.block_shape) == ((8, 6), (4, 2))
    assert torch.equal(pattern.mask(), MASK)


@pytest.mark.parametrize("source", ["pattern", "bsr", "scipy-bsr"])
def test_as_pattern_takes_the_block_shape_that_its_source_carries(source):
    assert as_pattern(SOURCES[source]()).block_shape == (4, 2)


def test_as_pattern_of_one_element_of_scipy_csr_stores_its_block():
    matrix = scipy.sparse.csr_matrix(([1.0, 2.0], ([7, 7], [2, 3])), shape=(8, 6))
    assert as_pattern(matrix, block_shape=(4, 2)).block_coords.tolist() == [[1, 1]]


def test_as_pattern_of_bsr_keeps_stored_zero_blocks_and_value_order():
    bsr = torch.sparse_bsr_tensor([0, 2, 3], [0, 2, 1], torch.zeros(3, 4, 2), size=(8, 6))
    assert as_pattern(bsr).block_coords.tolist() == [[0, 0], [0, 2], [1, 1]]


# Change makes a new pattern


@given(case=cases())
def test_rewire_moves_only_what_it_names(case):
    pattern = PATTERNS[case.pattern](case.shape, case.block)
    free = (~pattern.mask()).nonzero()
    count = min(3, len(free), pattern.nnz)
    slots = torch.randperm(pattern.nnz)[:count]
    before = pattern.block_coords.clone()
    after = pattern.rewire(slots, free[:count])
    expected = before.clone()
    expected[slots] = free[:count].int()
    assert torch.equal(after.block_coords, expected) and torch.equal(pattern.block_coords, before)
    assert_index_is_right(after)


def test_rewire_swaps_two_blocks():
    pattern = BlockPattern.from_coords(torch.tensor([[0, 0], [1, 1]]), (16, 16), (8, 8))
    swapped = pattern.rewire(torch.tensor([0, 1]), torch.tensor([[1, 1], [0, 0]]))
    assert swapped.block_coords.tolist() == [[1, 1], [0, 0]]
    assert_index_is_right(swapped)


@given(case=cases())
def test_rebuild_keeps_the_slots_of_kept_blocks(case):
    pattern = permuted(PATTERNS[case.pattern](case.shape, case.block))
    mask = pattern.mask().flatten()[torch.randperm(pattern.mask().numel())].view(pattern.grid_shape)
    after = pattern.rebuild(mask)
    assert torch.equal(after.mask(), mask)
    for slot, coord in enumerate(pattern.block_coords.tolist()):
        if mask[tuple(coord)]:
            assert after.block_coords[slot].tolist() == coord
    assert_index_is_right(after)


def test_rebuild_of_its_own_mask_is_the_same_pattern():
    pattern = permuted(BlockPattern.random((64, 64), 0.5, (8, 8)))
    assert pattern.rebuild(pattern.mask()) == pattern


# Immutability


@pytest.mark.parametrize("name", ["shape", "block_shape", "grid_shape", "nnz", "crow_indices", "new_attribute"])
def test_attributes_cannot_be_set_or_deleted(name):
    pattern = BlockPattern.random((64, 64), 0.5)
    with pytest.raises(AttributeError):
        setattr(pattern, name, 1)
    with pytest.raises(AttributeError):
        delattr(pattern, name)


@pytest.mark.parametrize("name", INDEX_ARRAYS)
def test_writing_into_an_array_is_noticed_at_its_next_use(name):
    pattern = BlockPattern.random((64, 64), 0.5, (16, 16))
    getattr(pattern, name).add_(1)
    with pytest.raises(BlockSparseError, match="immutable"):
        pattern.index()
    with pytest.raises(BlockSparseError):
        pattern.validate()


def test_validate_notices_a_write_past_the_version_counter():
    pattern = BlockPattern.random((64, 64), 0.5, (16, 16))
    pattern.col_indices.numpy()[0] += 1
    with pytest.raises(BlockSparseError, match="contradict"):
        pattern.validate()


# Copies


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_copies_share(copier):
    pattern = BlockPattern.random((64, 64), 0.5)
    assert copier(pattern) is pattern


def test_pickle_holds_the_coordinates_only():
    pattern = permuted(BlockPattern.random((1600, 1600), 0.5, (16, 16)))
    data = pickle.dumps(pattern)
    again = pickle.loads(data)
    assert again == pattern and again is not pattern
    again.validate()
    coordinates = pattern.nnz * 2 * 4
    assert coordinates < len(data) < coordinates + 2000


def test_equality_and_hash():
    def make(**changes) -> BlockPattern:
        arguments = {"block_coords": torch.tensor([[0, 1], [1, 0]]), "shape": (16, 16), "block_shape": (8, 8)}
        return BlockPattern.from_coords(**{**arguments, **changes})

    assert make() == make() and hash(make()) == hash(make())
    assert make() != make(block_coords=torch.tensor([[1, 0], [0, 1]]))  # other slots
    assert make() != make(block_coords=torch.tensor([[0, 1], [1, 1]]))
    assert make() != make(shape=(15, 16))
    assert make() != make(shape=(32, 32), block_shape=(16, 16))
    assert make() != "a pattern"


def test_repr():
    assert repr(BlockPattern.from_mask(MASK, (4, 2))) == (
        "BlockPattern(shape=(8, 6), block_shape=(4, 2), nnz=3, density=0.5)"
    )


# Surroundings


@pytest.mark.parametrize("kind", PATTERNS)
def test_patterns_hold_data_under_a_meta_device(kind):
    case = Case((40, 56), (8, 8), kind)
    with torch.device("meta"):
        pattern = BlockPattern.random(case.shape, 0.5, case.block) if kind in ("sparse", "half") else None
        for make in (BlockPattern.banded, BlockPattern.butterfly):
            make(case.shape, case.block).validate()
    if pattern is None:
        pattern = PATTERNS[kind](case.shape, case.block)
    with torch.device("meta"):
        moved = pattern.rewire([], torch.empty(0, 2, dtype=torch.int64, device="cpu"))
        again = pattern.rebuild(pattern.mask())
        assert pickle.loads(pickle.dumps(pattern)) == moved == again == pattern
        assert pattern.stored_elements() == moved.stored_elements()
    assert_index_is_right(moved)


def test_patterns_made_in_inference_mode_are_ordinary():
    with torch.inference_mode():
        pattern = BlockPattern.random((64, 64), 0.5, (16, 16))
        moved = pattern.rebuild(~pattern.mask())
    for each in (pattern, moved):
        assert not each.index().is_inference()
        assert_index_is_right(each)


def test_index_is_copied_to_a_device_once(device):
    pattern = BlockPattern.random((64, 64), 0.5, (16, 16))
    assert pattern.index(device) is pattern.index(device)
    assert pattern.index(device).device.type == device.type
    assert torch.equal(pattern.index(device).cpu(), pattern.index())
    assert torch.equal(pattern.arrays(device).block_coords.cpu(), pattern.block_coords)
