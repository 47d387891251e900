"""SparseOptimizer: what moves, what stays, what it saves, and the bugs of the 2020 package that it must not have."""

from __future__ import annotations

import copy
import io
import math
import time
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from test_training_parts import each_optimizer
from torch import Tensor, nn
from torch.nn import functional

import pytorch_block_sparse
from pytorch_block_sparse import BlockPattern, BlockSparseError, BlockSparseLinear, SparseOptimizer
from pytorch_block_sparse.training import SET, CubicDensity, MagnitudePruning, MovementPruning, RigL
from pytorch_block_sparse.training.selection import select_blocks

METHODS = {
    "SET": (SET(interval=3, fraction=0.4), None),
    "RigL": (RigL(stop=100, interval=3, fraction=0.4), None),
    "RigL-cubic": (RigL(stop=100, interval=3, fraction=0.4), CubicDensity(0.2, end=10, begin=2)),
    "magnitude-cubic": (MagnitudePruning(interval=3), CubicDensity(0.2, end=10, begin=2)),
    "movement-cubic": (MovementPruning(interval=3), CubicDensity(0.2, end=10, begin=2)),
}
each_method = pytest.mark.parametrize(("method", "schedule"), METHODS.values(), ids=METHODS)


def make_model(seed: int = 0, density: float = 0.5, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """24 -> 30 -> 18 in blocks of 4 x 4, with ragged edges, a fused activation and a dense layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        BlockSparseLinear(24, 30, density=density, block_shape=(4, 4), activation="gelu", dtype=dtype),
        nn.LayerNorm(30, dtype=dtype),
        BlockSparseLinear(30, 18, density=density, block_shape=(4, 4), dtype=dtype),
    )


def batches(count: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        tuple(torch.randn(16, side, generator=generator, dtype=torch.float64).to(dtype) for side in (24, 18))
        for _ in range(count)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for x, target in data:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), target)  # alive in the next forward, as in most training loops
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def blocks_by_place(layer: BlockSparseLinear, entry: Tensor) -> dict[tuple[int, int], Tensor]:
    return dict(zip(map(tuple, layer.block_coords.tolist()), entry.detach().clone(), strict=True))


# The same as masked-dense training


class MaskedTwin:
    """The model as dense layers times masks, and the same drop and grow written on dense weights."""

    def __init__(self, model: nn.Sequential) -> None:
        self.masks = {0: model[0].pattern.mask(), 2: model[2].pattern.mask()}
        self.weights = {i: model[i].weight.to_dense().detach().clone().requires_grad_() for i in self.masks}
        self.biases = {i: model[i].bias.detach().clone().requires_grad_() for i in self.masks}
        self.norm = copy.deepcopy(model[1])
        self.optimizer = torch.optim.AdamW(
            [*self.weights.values(), *self.biases.values(), *self.norm.parameters()], 0.01, weight_decay=0.1
        )

    def expand(self, i: int, grid: Tensor) -> Tensor:
        out, inner = self.weights[i].shape
        return grid.repeat_interleave(4, 0).repeat_interleave(4, 1)[:out, :inner]

    def norms(self, i: int, dense: Tensor) -> Tensor:
        rows, cols = self.masks[i].shape
        return torch.stack(
            [
                torch.stack([dense[4 * r : 4 * r + 4, 4 * c : 4 * c + 4].square().sum().sqrt() for c in range(cols)])
                for r in range(rows)
            ]
        )

    def step(self, x: Tensor, target: Tensor) -> float:
        self.optimizer.zero_grad()
        masked = {i: self.weights[i] * self.expand(i, mask) for i, mask in self.masks.items()}
        for weight in masked.values():
            weight.retain_grad()
        hidden = self.norm(functional.gelu(functional.linear(x, masked[0], self.biases[0])))
        loss = functional.mse_loss(functional.linear(hidden, masked[2], self.biases[2]), target)
        loss.backward()
        self.full_gradients = {i: weight.grad for i, weight in masked.items()}
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def drop_and_grow(self, density: float, fraction: float) -> None:
        for i, mask in list(self.masks.items()):
            stored = [tuple(place) for place in mask.nonzero().tolist()]
            strength, signal = self.norms(i, self.weights[i]), self.norms(i, self.full_gradients[i])
            target = round(density * mask.numel())
            kept = sorted(stored, key=lambda place: -strength[place])[: target - round(fraction * target)]
            places = [(r, c) for r in range(mask.shape[0]) for c in range(mask.shape[1]) if (r, c) not in kept]
            grown = sorted(places, key=lambda place: -signal[place])[: target - len(kept)]
            new = torch.zeros_like(mask)
            for place in [*kept, *grown] if fraction else kept:
                new[place] = True
            left = self.expand(i, new & mask).double()
            self.masks[i] = new
            for tensor in (
                self.weights[i],
                *(self.optimizer.state[self.weights[i]][k] for k in ("exp_avg", "exp_avg_sq")),
            ):
                tensor.mul_(left)


@pytest.mark.parametrize("kind", ["static", "RigL", "cubic"])
def test_twenty_steps_are_those_of_masked_dense_training(kind):
    model, data = make_model(), batches(20)
    twin = MaskedTwin(model)
    adamw = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    method = {
        "static": SET(interval=4, stop=0),
        "RigL": RigL(stop=16, interval=4, fraction=0.5),
        "cubic": MagnitudePruning(interval=4),
    }[kind]
    schedule = CubicDensity(0.15, end=16) if kind == "cubic" else None
    optimizer = SparseOptimizer(model, adamw, method=method, schedule=schedule)
    cells = {i: mask.numel() for i, mask in twin.masks.items()}
    changed = 0
    for step, (x, target) in enumerate(data, 1):
        (loss,) = train(model, optimizer, [(x, target)])
        assert loss == pytest.approx(twin.step(x, target), rel=1e-9)
        if step % 4 == 0 and kind != "static":
            fraction = 0.25 * (1 + math.cos(math.pi * step / 16)) if kind == "RigL" and step < 16 else 0
            twin.drop_and_grow(0.15 + 0.35 * (1 - min(step, 16) / 16) ** 3 if kind == "cubic" else 0.5, fraction)
            changed += sum(update.moved + update.removed for update in optimizer.last_update)
        for i in cells:
            assert torch.equal(model[i].pattern.mask(), twin.masks[i])
            dense = twin.weights[i] * twin.expand(i, twin.masks[i])
            torch.testing.assert_close(model[i].weight.to_dense(), dense, rtol=1e-9, atol=1e-12)
    assert (changed > 0) == (kind != "static")
    if kind == "cubic":
        assert [model[i].pattern.nnz for i in cells] == [round(0.15 * cells[i]) for i in cells]


# What moves and what stays


@each_optimizer
@each_method
def test_a_kept_block_keeps_its_bits_and_a_moved_one_begins_anew(make, method, schedule):
    """With every optimizer: compared block by block with the state just before the update of the pattern."""
    model = make_model(dtype=torch.float32)
    inner = make(list(model.parameters()))
    optimizer = SparseOptimizer(model, inner, method=method, schedule=schedule)
    data = batches(12, torch.float32)
    seen = {}

    def before_update(*_: object) -> None:
        for i in (0, 2):
            layer = model[i]
            state = {k: v for k, v in inner.state[layer.values].items() if isinstance(v, Tensor) and v.dim() == 3}
            seen[i] = {
                "slots": {tuple(place): slot for slot, place in enumerate(layer.block_coords.tolist())},
                **{key: blocks_by_place(layer, entry) for key, entry in {"values": layer.values, **state}.items()},
            }

    # Post hooks run in the order of their registration: this one has to come before the SparseOptimizer's.
    hooks = inner._optimizer_step_post_hooks
    handle = inner.register_step_post_hook(before_update)
    hooks.move_to_end(handle.id, last=False)
    identities = [model[i].values for i in (0, 2)]
    moved = removed = 0
    for x, target in data:
        train(model, optimizer, [(x, target)])
        updates = {int(update.name): update for update in optimizer.last_update if update.step == optimizer.steps}
        for i in (0, 2):
            layer, before = model[i], seen[i]
            state = {k: v for k, v in inner.state[layer.values].items() if k in before}
            for key, entry in {"values": layer.values, **state}.items():
                for place, block in blocks_by_place(layer, entry).items():
                    if place in before[key]:
                        assert torch.equal(block, before[key][place]), (key, place)
                    else:
                        assert (block == initial_value(inner, key)).all(), (key, place)
            if i in updates and not updates[i].removed:
                slots = {tuple(place): slot for slot, place in enumerate(layer.block_coords.tolist())}
                assert all(slots[place] == before["slots"][place] for place in slots.keys() & before["slots"].keys())
                assert len(slots.keys() - before["slots"].keys()) == updates[i].moved
            moved += updates[i].moved if i in updates else 0
            removed += updates[i].removed if i in updates else 0
    assert all(model[i].values is values for i, values in zip((0, 2), identities, strict=True))
    assert bool(removed) == (schedule is not None)
    assert moved > 0 or method.grow_signal is None


def initial_value(optimizer: torch.optim.Optimizer, key: str) -> float:
    if isinstance(optimizer, torch.optim.Adagrad) and key == "sum":
        return 0.25
    return 0.03 if isinstance(optimizer, torch.optim.Rprop) and key == "step_size" else 0.0


def test_movement_is_minus_the_sum_of_weight_times_gradient():
    model, data = make_model(), batches(5)
    optimizer = SparseOptimizer(
        model,
        torch.optim.SGD(model.parameters(), 0.05),
        method=MovementPruning(interval=5),
        schedule=CubicDensity(0.25, end=5),
    )
    scores = {i: torch.zeros(model[i].pattern.nnz, dtype=torch.float64) for i in (0, 2)}
    coords = {i: model[i].block_coords.clone() for i in (0, 2)}
    for x, target in data:
        optimizer.zero_grad()
        functional.mse_loss(model(x), target).backward()
        for i, score in scores.items():
            score -= (model[i].values.grad * model[i].values.detach()).sum((1, 2))
        optimizer.step()
    for i, score in scores.items():
        best = score.argsort(descending=True)[: model[i].pattern.nnz].sort()[0]
        assert torch.equal(model[i].block_coords, coords[i][best])


def test_movement_tells_shrinking_from_growing_blocks():
    """Large blocks that training pulls to zero go, small ones that it pulls up stay; magnitude does the contrary."""
    kept = {}
    for method in (MovementPruning(interval=20), MagnitudePruning(interval=20)):
        layer = BlockSparseLinear(8, 4, bias=False, pattern=torch.ones(1, 2) > 0, block_shape=(4, 4))
        with torch.no_grad():
            layer.values[0], layer.values[1] = 2.0, 0.01
        optimizer = SparseOptimizer(
            layer, torch.optim.SGD([layer.values], 0.02), method=method, schedule=CubicDensity(0.5, end=20)
        )
        for _ in range(20):
            optimizer.zero_grad()
            (0.5 * layer.values[0].square().sum() - layer.values[1].sum()).backward()
            optimizer.step()
        kept[type(method)] = layer.block_coords.tolist()
    assert kept == {MovementPruning: [[0, 1]], MagnitudePruning: [[0, 0]]}


@dataclass(frozen=True)
class MovementSET:
    """A method of one's own: drop by movement, grow anywhere."""

    interval: int = 2
    drop_signal: ClassVar = "movement"
    grow_signal: ClassVar = "random"

    def fraction_at(self, step: int) -> float:
        return 0.5


@pytest.mark.parametrize("held_twice", [False, True])
def test_a_method_of_ones_own_and_what_begins_anew_with_a_block(held_twice):
    """The movement of a moved block begins at zero, as its gradient; one step counts once, however many hold it."""
    model, data = make_model(), batches(3)
    inner = [torch.optim.SGD(model.parameters(), 0.01) for _ in range(1 + held_twice)]
    optimizer = SparseOptimizer(model, inner, method=MovementSET())
    score = torch.zeros(model[0].pattern.nnz, dtype=torch.float64)
    for step, (x, target) in enumerate(data, 1):
        optimizer.zero_grad()
        functional.mse_loss(model(x), target).backward()
        score -= (model[0].values.grad * model[0].values.detach()).sum((1, 2))
        coords = model[0].block_coords.clone()
        optimizer.step()
        moved = (model[0].block_coords != coords).any(1)
        assert moved.any() == (step == 2)
        if moved.any():
            assert moved.sum() == optimizer.last_update[0].moved
            assert score[moved].max() <= score[~moved].max()
            assert not model[0].values.grad[moved].any() and model[0].values.grad[~moved].any((1, 2)).all()
        score[moved] = 0
        torch.testing.assert_close(optimizer.state_dict()["layers"]["0"]["movement"], score)


def test_density_follows_the_schedule_by_layer():
    model = make_model(density=1.0)
    optimizer = SparseOptimizer(
        model,
        torch.optim.Adam(model.parameters()),
        method=MagnitudePruning(interval=4),
        schedule={"2": CubicDensity(0.25, begin=4, end=15)},
    )
    densities = []
    for batch in batches(17):
        train(model, optimizer, [batch])
        densities.append(optimizer.densities["2"])
    cells = model[2].pattern.mask().numel()
    at = {step: round((0.25 + 0.75 * (1 - (step - 4) / 11) ** 3) * cells) / cells for step in (8, 12, 15)}
    assert densities == [1.0] * 7 + [at[8]] * 4 + [at[12]] * 3 + [at[15]] * 3
    assert at[12] > at[15] == 0.25, "the last step is an update, though it is no multiple of the interval"
    assert optimizer.densities["0"] == 1.0


def test_frozen_layers_stay():
    model = make_model()
    model[0].values.requires_grad_(False)
    coords = model[0].block_coords.clone()
    optimizer = SparseOptimizer(model, torch.optim.SGD(model.parameters(), 0.1), method=SET(interval=1))
    train(model, optimizer, batches(2))
    assert torch.equal(model[0].block_coords, coords) and list(optimizer.densities) == ["2"]


def test_a_layer_that_no_backward_reached_keeps_its_pattern():
    model = make_model()
    spare = BlockSparseLinear(8, 8, block_shape=(4, 4))
    model.register_module("spare", spare)
    coords = spare.block_coords.clone()
    model.forward = lambda x: model[2](model[1](model[0](x)))
    optimizer = SparseOptimizer(model, torch.optim.Adam(model.parameters()), method=RigL(stop=9, interval=1))
    train(model, optimizer, batches(3))
    assert torch.equal(spare.block_coords, coords)
    assert {update.name for update in optimizer.last_update} == {"0", "2"}


def test_gradients_that_are_not_finite_leave_the_pattern():
    model = make_model()
    optimizer = SparseOptimizer(model, torch.optim.SGD(model.parameters(), 0.0), method=RigL(stop=9, interval=1))
    coords = [model[i].block_coords.clone() for i in (0, 2)]
    x, target = batches(1)[0]
    functional.mse_loss(model(x), target * math.inf).backward()
    for parameter in model.parameters():
        parameter.grad.zero_()  # the values stay finite
    with pytest.warns(UserWarning) as caught:
        optimizer.step()
    expected = "step 1: layer '{}' keeps its pattern, its gradient is not finite"
    assert [str(warning.message) for warning in caught] == [expected.format(name) for name in "02"]
    assert all(torch.equal(model[i].block_coords, coords[k]) for k, i in enumerate((0, 2)))


# The bugs of the 2020 package


def test_new_blocks_are_zero_not_a_negative_constant():
    """There they all held -std * scale: random_(0, 1) only ever draws 0."""
    model = make_model()
    optimizer = SparseOptimizer(model, torch.optim.SGD(model.parameters(), 0.0), method=SET(interval=1, fraction=0.5))
    before = blocks_by_place(model[0], model[0].values)
    train(model, optimizer, batches(1))
    new = [block for place, block in blocks_by_place(model[0], model[0].values).items() if place not in before]
    assert new and not torch.stack(new).any()
    train(model, torch.optim.SGD(model.parameters(), 0.1), batches(1))
    now = blocks_by_place(model[0], model[0].values)
    assert all(block.any() for place, block in now.items() if place not in before), "they learn"


@pytest.mark.parametrize(
    "make", [lambda: SET(interval=1, fraction=0.9), lambda: RigL(stop=9, interval=1, fraction=0.9)]
)
@pytest.mark.parametrize("density", [0.9, 1.0])
def test_fewer_free_places_than_dropped_blocks(make, density):
    """There the indices and the places did not fit together: a crash."""
    model = make_model(density=density)
    optimizer = SparseOptimizer(model, torch.optim.Adam(model.parameters()), method=make())
    counts = [model[i].pattern.nnz for i in (0, 2)]
    train(model, optimizer, batches(3))
    assert [model[i].pattern.nnz for i in (0, 2)] == counts
    free = {str(i): (~model[i].pattern.mask()).sum() for i in (0, 2)}
    assert all(update.moved <= free[update.name] for update in optimizer.last_update)


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_sgd_serves(momentum):
    """There every optimizer but Adam was an exception."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=momentum)
    losses = train(model, SparseOptimizer(model, sgd, method=SET(interval=2)), batches(1) * 30)
    assert losses[-1] < losses[0]


def test_every_attached_optimizer_is_updated():
    """There ``found or update()`` skipped the optimizers after the first that held the layer."""
    model = make_model()
    adams = [torch.optim.Adam(model.parameters(), 0.01) for _ in range(3)]
    optimizer = SparseOptimizer(model, adams, method=SET(interval=1, fraction=0.5))
    coords = model[0].block_coords.clone()
    train(model, optimizer, batches(1))
    moved = (model[0].block_coords != coords).any(1)
    assert moved.any()
    for adam in adams:
        assert not adam.state[model[0].values]["exp_avg"][moved].any()
        assert adam.state[model[0].values]["exp_avg"][~moved].any((1, 2)).all()


def test_state_dict_is_complete():
    """There it asked its groups for "params", which they had not: KeyError."""
    model = make_model()
    optimizer = SparseOptimizer(model, torch.optim.Adam(model.parameters()), method=SET())
    train(model, optimizer, batches(1))
    state = optimizer.state_dict()
    assert state["steps"] == 1 and set(state["layers"]) == {"0", "2"} and len(state["optimizers"]) == 1


# Wrapping and attaching


def test_attaching_is_wrapping():
    results = []
    for wrap in (True, False):
        model = make_model()
        adam = torch.optim.Adam(model.parameters(), 0.01)
        torch.manual_seed(3)
        if wrap:
            train(model, SparseOptimizer(model, adam, method=SET(interval=2)), batches(7))
        else:
            SparseOptimizer(model, method=SET(interval=2)).attach(adam)
            train(model, adam, batches(7))
        results.append(model.state_dict())
    assert all(torch.equal(entry, results[1][name]) for name, entry in results[0].items())


def test_several_optimizers_and_groups():
    """Values in two optimizers, biases in a third with two groups: one update when both holders have stepped."""
    model = make_model()
    first, second = torch.optim.SGD([model[0].values], 0.1, momentum=0.9), torch.optim.Adam([model[2].values], 0.01)
    rest = torch.optim.AdamW([{"params": [model[0].bias, model[2].bias]}, {"params": model[1].parameters(), "lr": 0.1}])
    optimizer = SparseOptimizer(model, (first, second, rest), method=RigL(stop=99, interval=1, fraction=0.5))
    x, target = batches(1)[0]
    functional.mse_loss(model(x), target).backward()
    first.step()
    rest.step()
    assert optimizer.steps == 0
    second.step()
    assert optimizer.steps == 1 and all(update.moved for update in optimizer.last_update)
    assert len(optimizer.param_groups) == 4 and model[0].values in optimizer.state
    losses = train(model, optimizer, batches(1) * 20)
    assert losses[-1] < losses[0] and optimizer.steps == 21


def test_detach_ends_it():
    model = make_model()
    adam = torch.optim.Adam(model.parameters())
    optimizer = SparseOptimizer(model, adam, method=SET(interval=1))
    optimizer.detach()
    coords = model[0].block_coords.clone()
    train(model, adam, batches(2))
    assert torch.equal(model[0].block_coords, coords) and optimizer.steps == 0
    with pytest.raises(BlockSparseError, match="step needs an attached optimizer, got none"):
        optimizer.step()


def test_closure():
    results = []
    for closed in (True, False):
        model, (x, target) = make_model(), batches(1)[0]
        optimizer = SparseOptimizer(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            method=MovementPruning(interval=2),
            schedule=CubicDensity(0.25, end=6),
        )

        def closure(model=model, optimizer=optimizer, x=x, target=target):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), target)
            loss.backward()
            return loss

        for _ in range(6):
            if closed:
                assert optimizer.step(closure).ndim == 0
            else:
                closure()
                optimizer.step()
        results.append(model.state_dict())
    assert all(torch.equal(entry, results[1][name]) for name, entry in results[0].items())
    with pytest.raises(BlockSparseError, match=r"call SparseOptimizer\.step\(closure\)"):
        optimizer.optimizers[0].step(lambda: 0.0)


@pytest.mark.parametrize("on", ["inner", "sparse"])
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ],
    ids=["cosine", "one-cycle", "lambda"],
)
def test_learning_rate_schedulers(make, on):
    model = make_model()
    adam = torch.optim.AdamW(model.parameters(), 0.1)
    optimizer = SparseOptimizer(model, adam, method=SET(interval=2))
    plain = torch.optim.AdamW(make_model().parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler that misses the optimizer's steps says so
        scheduler, expected = make(optimizer if on == "sparse" else adam), make(plain)
        for x, target in batches(5):
            train(model, optimizer, [(x, target)])
            plain.step()
            scheduler.step()
            expected.step()
            assert adam.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_accumulated_gradients_choose_as_one_batch_does():
    coords = []
    for pieces in (1, 4):
        model = make_model()
        optimizer = SparseOptimizer(
            model, torch.optim.SGD(model.parameters(), 0.1), method=RigL(stop=9, interval=1, fraction=0.5)
        )
        x, target = batches(1)[0]
        for part, wanted in zip(x.chunk(pieces), target.chunk(pieces), strict=True):
            (functional.mse_loss(model(part), wanted) / pieces).backward()
        optimizer.step()
        coords.append([model[i].block_coords.tolist() for i in (0, 2)])
    assert coords[0] == coords[1]


def test_grad_scaler_and_autocast():
    """float32 parameters under bfloat16 autocast; a step that the scaler skips is none."""
    model = make_model(dtype=torch.float32)
    sgd = torch.optim.SGD(model.parameters(), 0.05)
    optimizer = SparseOptimizer(model, sgd, method=RigL(stop=99, interval=1, fraction=0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, (x, target) in enumerate(batches(3, torch.float32)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.mse_loss(model(x), target)
        scaler.scale(loss * (math.inf if step == 1 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.steps == 2 and all(update.moved for update in optimizer.last_update)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# Saving


@each_method
def test_a_resumed_training_is_bitwise_the_same(method, schedule):
    def start(density=0.5):
        model = make_model(int(torch.randint(1000, ())), density)
        optimizers = [
            torch.optim.AdamW([*model[0].parameters(), *model[1].parameters()], 0.01),
            torch.optim.SGD(model[2].parameters(), 0.01, momentum=0.9),
        ]
        optimizer = SparseOptimizer(model, optimizers, method=method, schedule=schedule)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def go(parts, data):
        model, optimizer, scheduler = parts
        for x, target in data:
            train(model, optimizer, [(x, target)])
            scheduler.step()

    data = batches(14)
    parts = start()
    go(parts, data[:7])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    go(parts, data[7:])

    file.seek(0)
    torch.rand(5)
    resumed = start(density=0.3 if schedule is not None else 0.5)  # the state knows where the density began
    for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert resumed[1].steps == 7
    go(resumed, data[7:])
    expected, found = (flatten([part.state_dict() for part in each]) for each in (parts, resumed))
    assert expected.keys() == found.keys()
    for key, entry in expected.items():
        same = torch.equal(entry, found[key]) if isinstance(entry, Tensor) else entry == found[key]
        assert same, key
    assert parts[1].last_update == resumed[1].last_update


def flatten(entry: object, path: str = "") -> dict[str, object]:
    if isinstance(entry, dict):
        return {k: v for key, each in entry.items() for k, v in flatten(each, f"{path}.{key}").items()}
    if isinstance(entry, list | tuple):
        return {k: v for key, each in enumerate(entry) for k, v in flatten(each, f"{path}.{key}").items()}
    return {path: entry}


def break_state(key: str, value: object):
    def change(state: dict) -> None:
        *path, last = key.split("/")
        for name in path:
            state = state[name]
        if value is None:
            del state[last]
        else:
            state[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_state("version", 2), "of version 1, got 2"),
        (break_state("generator", None), "state_dict must hold generator"),
        (break_state("steps", -1), "must be an integer >= 0"),
        (break_state("method", "RigL"), "state_dict must be of MovementPruning, got RigL"),
        (break_state("layers/0", None), r"state_dict must be of the layers \['0', '2'\], got \['2'\]"),
        (
            break_state("layers/0/block_coords", torch.zeros(1, 2, dtype=torch.int32)),
            "layer '0' differs: load the model",
        ),
        (break_state("layers/2/movement", torch.zeros(1)), "must hold the movement of every block of layer '2'"),
        (break_state("optimizers", []), r"groups of \[\[6\]\] parameters, got \[\]"),
    ],
)
def test_a_wrong_state_dict_changes_nothing(change, message):
    model = make_model()
    optimizer = SparseOptimizer(
        model, torch.optim.Adam(model.parameters()), method=MovementPruning(), schedule=CubicDensity(0.25, end=9)
    )
    train(model, optimizer, batches(2))
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(BlockSparseError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    for key, entry in flatten(before).items():
        found = flatten(after)[key]
        assert torch.equal(entry, found) if isinstance(entry, Tensor) else entry == found


def test_a_model_loaded_without_the_optimizers_state_is_an_error():
    small, model = make_model(density=0.25), make_model()
    optimizer = SparseOptimizer(
        model, torch.optim.SGD(model.parameters(), 0.1), method=MovementPruning(), schedule=CubicDensity(0.2, end=9)
    )
    model.load_state_dict(small.state_dict())
    with pytest.raises(BlockSparseError, match="layer '0' must have the 24 blocks whose movement is known, got 12"):
        train(model, optimizer, batches(1))
    # Trainer gives the optimizer its own state back in between, and its saved one later.
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["layers"]["0"]["movement"] is None
    with pytest.raises(BlockSparseError, match="whose movement is known"):
        optimizer.step()


# Arguments


def tied() -> nn.Module:
    model = nn.Sequential(BlockSparseLinear(8, 8, block_shape=(4, 4)), BlockSparseLinear(8, 8, block_shape=(4, 4)))
    model[1].values = model[0].values
    return model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, r"model must be a torch\.nn\.Module, got int"),
        ({"model": nn.Linear(2, 2)}, "model must have a BlockSparseLinear that requires a gradient, got none"),
        ({"model": tied()}, "layers must not share values, got '0' and '1'"),
        ({"model": BlockSparseLinear(8, 8, device="meta")}, "must be an ordinary tensor with data"),
        ({"method": "SET"}, "method must be SET, RigL"),
        ({"schedule": 0.5}, "schedule must be a density schedule, got 0.5"),
        (
            {"schedule": {"7": CubicDensity(0.5, end=3)}},
            r"schedule must name sparse layers that are trained, got \['7'\]",
        ),
        ({"method": MagnitudePruning()}, "schedule must let the density fall with MagnitudePruning, .* got None"),
        ({"generator": 5}, "generator must be a torch.Generator on the CPU, got 5"),
        ({"optimizers": [torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])]}, "got LBFGS"),
        ({"optimizers": ["Adam"]}, r"optimizer must be a torch\.optim\.Optimizer, got str"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(BlockSparseError, match=message):
        SparseOptimizer(**{"model": make_model(), "method": SET(), **arguments})


def test_values_without_an_optimizer_are_an_error_before_the_first_step():
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = SparseOptimizer(model, torch.optim.SGD(model[0].parameters(), 0.1), method=SET())
    with pytest.raises(BlockSparseError, match="but those of '2' are not: attach"):
        train(model, optimizer, batches(1))
    assert all(torch.equal(entry, model.state_dict()[name]) for name, entry in before.items())
    optimizer.attach(torch.optim.SGD(model[2].parameters(), 0.1))
    train(model, optimizer, batches(1))
    with pytest.raises(BlockSparseError, match="optimizer must not be attached twice"):
        optimizer.attach(optimizer.optimizers[0])
    with pytest.raises(BlockSparseError, match="got a SparseOptimizer"):
        optimizer.attach(optimizer)
    with pytest.raises(BlockSparseError, match="one of the attached optimizers"):
        optimizer.add_param_group({"params": []})


def test_compiled_model(fresh_compiler):
    """No hook sees the inputs of compiled layers: RigL must not go on with nothing to choose by."""
    model = make_model()
    compiled = torch.compile(model, backend="eager")
    optimizer = SparseOptimizer(
        compiled, torch.optim.SGD(model.parameters(), 0.1), method=RigL(stop=99, interval=2, fraction=0.5)
    )
    assert set(optimizer.densities) == {"0", "2"}, "names without the wrapper's prefix"
    for step, batch in enumerate(batches(5), 1):
        assert optimizer.gradient_is_due == (step % 2 == 0)
        with torch.compiler.set_stance("force_eager" if optimizer.gradient_is_due else "default"):
            train(compiled, optimizer, [batch])
    assert [(update.step, update.moved > 0) for update in optimizer.last_update] == [(4, True)] * 2
    expected = make_model()
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(compiled(batches(1)[0][0]), expected(batches(1)[0][0]))
    with pytest.raises(BlockSparseError, match="forward of layer '0' to run eagerly"):
        train(compiled, optimizer, batches(1))


def test_the_model_and_the_public_names():
    assert pytorch_block_sparse.SparseOptimizer is pytorch_block_sparse.training.SparseOptimizer
    model = make_model()
    optimizer = SparseOptimizer(model, torch.optim.Adam(model.parameters()), method=RigL(stop=9, interval=1))
    duplicate = copy.deepcopy(model)
    duplicate(batches(1)[0][0]).sum().backward()
    assert all(not entry.tap.records for entry in optimizer._entries)
    assert repr(optimizer).startswith(
        "SparseOptimizer(RigL(stop=9, interval=1, fraction=0.3), layers=2, optimizers=[Adam]"
    )
    with pytest.raises(BlockSparseError, match="must be saved by its state_dict"):
        copy.deepcopy(optimizer)


def test_a_million_blocks_are_chosen_quickly():
    pattern = BlockPattern.random((2048 * 16, 2048 * 16), 0.25, (16, 16))
    begin = time.perf_counter()
    mask = select_blocks(pattern, torch.rand(pattern.nnz), torch.rand(pattern.grid_shape), pattern.nnz, 0.3)
    assert int(mask.sum()) == pattern.nnz and time.perf_counter() - begin < 20
