"""SparseOptimizer on several ranks: two processes with gloo on the CPU."""

from __future__ import annotations

import datetime
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pytorch_block_sparse import BlockSparseError, BlockSparseLinear, SparseOptimizer
from pytorch_block_sparse.training import SET, CubicDensity, MagnitudePruning, MovementPruning, RigL

RANKS = 2
STEPS = 12
CASES = {
    "SET": (SET(interval=3, fraction=0.4), None),
    "RigL": (RigL(stop=100, interval=3, fraction=0.4), None),
    "RigL-cubic": (RigL(stop=100, interval=3, fraction=0.4), CubicDensity(0.2, end=10)),
    "magnitude-cubic": (MagnitudePruning(interval=3), CubicDensity(0.2, end=10)),
    "movement-cubic": (MovementPruning(interval=3), CubicDensity(0.2, end=10)),
}


def make_model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        BlockSparseLinear(24, 30, block_shape=(4, 4), activation="relu", dtype=torch.float64),
        torch.nn.Linear(30, 20, dtype=torch.float64),
        BlockSparseLinear(20, 18, block_shape=(4, 4), dtype=torch.float64),
    )


def train(model: torch.nn.Module, optimizer: SparseOptimizer, shard: slice) -> None:
    """Each step on this rank's share of a batch of 16."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        x, target = (torch.randn(16, side, generator=generator, dtype=torch.float64) for side in (24, 18))
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x[shard]), target[shard])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def run_rank(rank: int, folder: str, work: str) -> None:
    """One process: starts the group, does ``work``, and leaves its result or its traceback in ``folder``."""
    torch.set_num_threads(1)
    path = Path(folder)
    try:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{path / 'rendezvous'}",
            rank=rank,
            world_size=RANKS,
            timeout=datetime.timedelta(seconds=40),
        )
        result = globals()[work](rank)
        distributed.destroy_process_group()
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, path / f"{rank}.pt")


def on_ranks(folder: Path, work: str) -> list:
    multiprocessing.spawn(run_rank, (str(folder), work), nprocs=RANKS)
    results = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    for result in results:
        assert not isinstance(result, str), result
    return results


def train_every_case(rank: int) -> dict:
    """Ranks begin with other patterns, values and random states: the first rank's count."""
    states = {}
    for name, (method, schedule) in CASES.items():
        model = make_model(seed=rank)
        adam = torch.optim.AdamW(model.parameters(), 0.02)
        torch.manual_seed(100 + rank)
        optimizer = SparseOptimizer(model, adam, method=method, schedule=schedule)
        parallel = DistributedDataParallel(model, broadcast_buffers=name != "SET")
        train(parallel, optimizer, slice(8 * rank, 8 * rank + 8))
        states[name] = (model.state_dict(), [adam.state[layer.values]["exp_avg"] for layer in (model[0], model[2])])
    return states


@pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_ranks_train_one_pattern_that_of_a_single_process(tmp_path):
    first, second = on_ranks(tmp_path, "train_every_case")
    for name, (method, schedule) in CASES.items():
        for key, entry in first[name][0].items():
            assert torch.equal(entry, second[name][0][key]), (name, key)
        assert all(map(torch.equal, first[name][1], second[name][1])), name

        model = make_model(seed=0)
        coords = model[0].block_coords.clone()
        torch.manual_seed(100)
        optimizer = SparseOptimizer(
            model, torch.optim.AdamW(model.parameters(), 0.02), method=method, schedule=schedule
        )
        train(model, optimizer, slice(None))
        for key, entry in model.state_dict().items():
            torch.testing.assert_close(first[name][0][key], entry, rtol=1e-6, atol=1e-9, msg=f"{name} {key}")
        assert not torch.equal(model[0].block_coords, coords), name


def go_wrong(rank: int) -> list[str]:
    messages = []
    model = make_model(seed=0)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(BlockSparseError) as error:
        SparseOptimizer(
            DistributedDataParallel(model), sgd, method=MagnitudePruning(), schedule=CubicDensity(0.25, end=5)
        )
    messages.append(str(error.value))
    layer = BlockSparseLinear(16, 16, density=(1 + rank) / 4, block_shape=(4, 4))
    with pytest.raises(BlockSparseError) as error:
        SparseOptimizer(layer, torch.optim.SGD(layer.parameters(), 0.1), method=SET())
    messages.append(str(error.value))
    # Only the first rank's layer sees a batch: no rank may wait for ever for the other's gradient.
    layer = BlockSparseLinear(16, 16, density=0.5, block_shape=(4, 4))
    optimizer = SparseOptimizer(
        layer, torch.optim.SGD(layer.parameters(), 0.1), method=RigL(stop=9, interval=1, fraction=0.5)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if rank == 0:
            layer(torch.randn(3, 16)).sum().backward()
        optimizer.step()
    messages.append(str(layer.block_coords.tolist()))
    return messages


@pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_what_cannot_work_on_several_ranks_is_an_error_on_all(tmp_path):
    first, second = on_ranks(tmp_path, "go_wrong")
    assert "must not be wrapped in DistributedDataParallel before SparseOptimizer" in first[0]
    assert "every rank must have the same number of blocks in each layer, but 1 of 1" in first[1]
    assert first[0] == second[0] and "this rank has [8]" in second[1]
    assert first[2] == second[2]
