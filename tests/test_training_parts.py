"""The parts of the pattern training: schedules, methods, selection, the growth signal, optimizer state."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from pytorch_block_sparse import BlockPattern, BlockSparseError, BlockSparseLinear, ops
from pytorch_block_sparse.blocks import to_grid
from pytorch_block_sparse.training import (
    SET,
    CubicDensity,
    MagnitudePruning,
    MovementPruning,
    RigL,
    gradient_block_norms,
    gradient_tap,
)
from pytorch_block_sparse.training.gradient_tap import GradientTap
from pytorch_block_sparse.training.optimizer_state import check_optimizer, reset_slots, resize_slots
from pytorch_block_sparse.training.selection import select_blocks

# Schedules and methods


@given(initial=st.floats(0.01, 1), final=st.floats(0.01, 1), begin=st.integers(0, 50), length=st.integers(1, 50))
@example(initial=0.9337872031243056, final=0.3, begin=0, length=1)  # final + (initial - final) is not initial
def test_cubic_density_is_zhu_and_guptas_sparsity(initial, final, begin, length):
    schedule = CubicDensity(final, end=begin + length, begin=begin)
    densities = [schedule.density(step, initial) for step in range(begin + length + 5)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(densities))
    assert all(density == initial for density in densities[: begin + 1])
    assert all(density == pytest.approx(min(initial, final)) for density in densities[begin + length :])
    if final < initial:
        for step in range(begin, begin + length + 1):
            sparsity = (1 - final) + ((1 - initial) - (1 - final)) * (1 - (step - begin) / length) ** 3
            assert 1 - densities[step] == pytest.approx(sparsity)


def test_fractions():
    assert [SET(fraction=0.2, stop=10).fraction_at(step) for step in (1, 9, 10)] == [0.2, 0.2, 0]
    assert SET().fraction_at(10**9) == 0.3
    assert RigL(stop=100, fraction=0.4).fraction_at(25) == pytest.approx(0.2 * (1 + 0.5**0.5))
    assert RigL(stop=100).fraction_at(100) == RigL(stop=100).fraction_at(500) == 0
    assert MagnitudePruning().fraction_at(5) == MovementPruning().fraction_at(5) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CubicDensity(0, end=5), r"final must be a number in \(0, 1\], got 0"),
        (lambda: CubicDensity(True, end=5), "final must be a number"),
        (lambda: CubicDensity(0.5, end=5, begin=5), "end must be an integer >= 6 that fits int32, got 5"),
        (lambda: CubicDensity(0.5, end=5, begin=-1), "begin must be an integer >= 0"),
        (lambda: SET(fraction=1.5), r"fraction must be a number in \(0, 1\], got 1.5"),
        (lambda: SET(interval=0), "interval must be an integer >= 1"),
        (lambda: SET(stop=-1), "stop must be an integer >= 0"),
        (lambda: RigL(stop=0), "stop must be an integer >= 1"),
        (lambda: RigL(stop=5, fraction=float("nan")), "fraction must be a number"),
        (lambda: MagnitudePruning(interval=2.5), "interval must be an integer >= 1"),
        (lambda: MovementPruning(interval=0), "interval must be an integer >= 1"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(BlockSparseError, match=message):
        make()


# Selection


def grid_of(pattern: BlockPattern, scores: torch.Tensor) -> dict[tuple[int, int], float]:
    return dict(zip(map(tuple, pattern.block_coords.tolist()), scores.tolist(), strict=True))


@given(
    rows=st.integers(1, 6),
    cols=st.integers(1, 6),
    share=st.floats(0.05, 1),
    left=st.floats(0.05, 1),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
def test_selection_keeps_the_strongest_and_grows_the_best(rows, cols, share, left, fraction, seed):
    generator = torch.Generator().manual_seed(seed)
    pattern = BlockPattern.random((rows, cols), share, (1, 1), generator=generator)
    drop = torch.rand(pattern.nnz, generator=generator)
    grow = torch.rand(rows, cols, generator=generator)
    count = max(1, round(left * pattern.nnz))
    mask = select_blocks(pattern, drop, grow, count, fraction)
    assert mask.shape == (rows, cols) and int(mask.sum()) == count
    stored = grid_of(pattern, drop)
    survivors = sorted(stored, key=stored.get, reverse=True)[: count - round(fraction * count)]
    assert all(mask[place] for place in survivors)
    others = [(row, col) for row in range(rows) for col in range(cols) if (row, col) not in survivors]
    grown = [place for place in others if mask[place]]
    assert min((grow[place] for place in grown), default=2) >= max(
        (grow[place] for place in others if not mask[place]), default=-1
    )
    assert torch.equal(mask, select_blocks(pattern, drop, grow, count, fraction))


def test_selection_without_growth_only_removes():
    pattern = BlockPattern.from_mask(torch.tensor([[1, 1, 0], [0, 1, 1]]) > 0, (1, 1))
    mask = select_blocks(pattern, torch.tensor([3.0, 1.0, 1.0, 2.0]), None, 3, 0.5)
    assert mask.tolist() == [[True, True, False], [False, False, True]], "a tie: the lower slot stays"
    assert torch.equal(select_blocks(pattern, torch.ones(4), None, 6, 0.0), pattern.mask())


# The growth signal


@pytest.mark.parametrize("rows_at_a_time", [1, 2, 100])
@pytest.mark.parametrize("shape", [(14, 9), (16, 12), (3, 40)], ids=str)
def test_gradient_block_norms_are_those_of_the_dense_gradient(shape, rows_at_a_time, monkeypatch):
    monkeypatch.setattr(gradient_tap, "CHUNK_ELEMENTS", rows_at_a_time * 4 * shape[1])
    pattern = BlockPattern.random(shape, 0.5, (4, 4))
    records = [(torch.randn(t, shape[1]).double(), torch.randn(t, shape[0]).double()) for t in (5, 1, 0)]
    pieces = []
    found = gradient_block_norms(records, pattern, reduce=lambda piece: pieces.append(piece.numel()))
    dense = sum(dy.t() @ x for x, dy in records)
    torch.testing.assert_close(found, torch.linalg.vector_norm(to_grid(dense, (4, 4)), dim=(2, 3)))
    assert max(pieces) <= rows_at_a_time * 4 * shape[1] and sum(pieces) == dense.numel()


@pytest.mark.parametrize("activation", [None, *ops.ACTIVATIONS])
def test_tap_sees_the_full_weight_gradient(activation):
    """Through two microbatches, any leading dimensions, and the derivative of a fused activation."""
    layer = BlockSparseLinear(9, 14, block_shape=(4, 4), activation=activation, dtype=torch.float64)
    dense = layer.weight.to_dense().detach().requires_grad_()
    tap = GradientTap(layer, lambda: True)
    layer.register_forward_hook(tap, with_kwargs=True)
    batches = [torch.randn(2, 3, 9).double(), torch.randn(4, 9).double()]
    layer(batches[0]).sin().sum().backward()
    layer(x=batches[1]).sin().sum().backward()
    for x in batches:
        before = nn.functional.linear(x, dense, layer.bias)
        after = {
            None: lambda value: value,
            "gelu_tanh": lambda value: nn.functional.gelu(value, approximate="tanh"),
        }.get(activation) or getattr(nn.functional, activation)
        after(before).sin().sum().backward()
    found = gradient_block_norms(tap.records, layer.pattern)
    torch.testing.assert_close(found, torch.linalg.vector_norm(to_grid(dense.grad, (4, 4)), dim=(2, 3)))


def test_tap_forgets_a_skipped_step_and_ignores_what_nobody_wants():
    layer = BlockSparseLinear(9, 14, block_shape=(4, 4))
    wanted = True
    tap = GradientTap(layer, lambda: wanted)
    layer.register_forward_hook(tap, with_kwargs=True)
    for set_to_none in (True, False):
        layer(torch.full((2, 9), float("inf"))).sum().backward()
        layer.zero_grad(set_to_none)
        if not set_to_none:
            layer.values.grad.zero_()
        layer(torch.ones(2, 9)).sum().backward()
        assert len(tap.records) == 1 and tap.records[0][0].isfinite().all()
    tap.clear()
    wanted = False
    layer(torch.ones(2, 9)).sum().backward()
    with torch.no_grad():
        wanted = True
        layer(torch.ones(2, 9))
    assert tap.records == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_tapped_layer_is_not_tapped(duplicate):
    layer = BlockSparseLinear(9, 14, block_shape=(4, 4))
    tap = GradientTap(layer, lambda: True)
    layer.register_forward_hook(tap, with_kwargs=True)
    other = duplicate(layer)
    other(torch.randn(2, 9)).sum().backward()
    assert tap.records == []


# Optimizer state

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD-momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "Adam-amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "Adam-foreach": lambda p: torch.optim.Adam(p, 0.1, foreach=True),
    "Adam-fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.25),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.03),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def trained(make, shape=(5, 4, 3), steps=3):
    torch.manual_seed(1)
    values = nn.Parameter(torch.randn(shape))
    optimizer = make([{"params": [nn.Parameter(torch.randn(2))]}, {"params": [values]}])
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return values, optimizer


def fresh_state(make, shape=(5, 4, 3)) -> dict:
    """The state that one step with gradient zero leaves: that of a block never trained."""
    values = nn.Parameter(torch.zeros(shape))
    optimizer = make([values])
    values.grad = torch.zeros(shape)
    optimizer.step()
    return optimizer.state[values]


@each_optimizer
def test_reset_is_exact_and_leaves_other_blocks_alone(make):
    values, optimizer = trained(make)
    before = copy.deepcopy(optimizer.state[values])
    reset_slots(optimizer, values, torch.tensor([3, 1]))
    after = optimizer.state[values]
    assert set(after) == set(before)
    fresh = fresh_state(make)
    for key, entry in before.items():
        if isinstance(entry, torch.Tensor) and entry.dim() == 3:
            assert torch.equal(after[key][[0, 2, 4]], entry[[0, 2, 4]]), key
            if key == "ax":
                assert not after[key][[1, 3]].any(), "an average of values: a new block's are zero"
            elif key not in ("row_var", "col_var", "square_avg", "exp_inf"):
                assert torch.equal(after[key][[1, 3]], fresh[key][[1, 3]]), key
            else:  # decayed by the probing step, or kept from zero by eps
                assert not after[key][[1, 3]].any(), key
        elif isinstance(entry, torch.Tensor):
            assert torch.equal(after[key], entry), key
    per_slot = [key for key, entry in before.items() if isinstance(entry, torch.Tensor) and entry.dim() == 3]
    assert bool(per_slot) == (make is not OPTIMIZERS["SGD"])


@each_optimizer
def test_resize_slices_the_state_and_the_optimizer_goes_on(make):
    values, optimizer = trained(make)
    before, shape = copy.deepcopy(optimizer.state[values]), values.shape
    kept = torch.tensor([1, 4])
    values.grad = None
    values.data = torch.cat((values.data[kept], torch.zeros(1, 4, 3)))
    resize_slots(optimizer, values, shape, kept)
    for key, entry in optimizer.state[values].items():
        if isinstance(entry, torch.Tensor) and entry.dim() == 3:
            assert entry.shape[0] == 3 and torch.equal(entry[:2], before[key][kept]), key
            initial = {"sum": 0.25 if make is OPTIMIZERS["Adagrad"] else 0, "step_size": 0.03}.get(key, 0)
            assert (entry[2] == initial).all(), key
    values.grad = torch.ones_like(values)
    optimizer.step()
    assert values.isfinite().all()


def test_what_is_not_held_is_left_alone():
    values, optimizer = trained(OPTIMIZERS["Adam"])
    state = copy.deepcopy(optimizer.state_dict())
    reset_slots(optimizer, nn.Parameter(torch.zeros(5, 4, 3)), torch.tensor([0]))
    untrained = OPTIMIZERS["Adam"]([values])
    reset_slots(untrained, values, torch.tensor([0]))
    assert not untrained.state and str(state) == str(optimizer.state_dict())


def test_optimizers_that_do_not_serve_are_refused():
    values = nn.Parameter(torch.zeros(1))
    with pytest.raises(BlockSparseError, match=r"optimizer must be a torch\.optim\.Optimizer, got str"):
        check_optimizer("Adam")
    with pytest.raises(BlockSparseError, match="got LBFGS"):
        check_optimizer(torch.optim.LBFGS([values]))
