"""A sparse model under FSDP2: it trains as without, saves and loads; what moves blocks says that it cannot."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import distributed, nn

from pytorch_block_sparse import BlockSparseError, BlockSparseLinear, SparseOptimizer
from pytorch_block_sparse.training import SET

fsdp = pytest.importorskip("torch.distributed.fsdp")
state_dicts = pytest.importorskip("torch.distributed.checkpoint.state_dict")
FULL = state_dicts.StateDictOptions(full_state_dict=True)


@pytest.fixture
def mesh(tmp_path):
    """A process group of this process alone."""
    if not distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def make_model() -> nn.Sequential:
    return nn.Sequential(
        BlockSparseLinear(32, 60, block_shape=(8, 8), activation="gelu"),
        nn.Linear(60, 32),
        BlockSparseLinear(32, 16, block_shape=(8, 8)),
    )


def shard(model: nn.Sequential, mesh: distributed.DeviceMesh) -> nn.Sequential:
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 32, generator=generator)).square().mean().backward()
        optimizer.step()


def test_training_is_the_same_and_the_state_dict_plain(mesh):
    plain, x = make_model(), torch.randn(5, 32)
    sharded = shard(copy.deepcopy(plain), mesh)
    assert isinstance(sharded[0].values, distributed.tensor.DTensor)
    train(plain)
    train(sharded)
    full = state_dicts.get_model_state_dict(sharded, options=FULL)
    assert full.keys() == plain.state_dict().keys()
    assert all(torch.equal(full[name], tensor) for name, tensor in plain.state_dict().items())
    other = make_model()
    other.load_state_dict(full)
    assert torch.equal(other(x), plain(x))


def test_a_model_on_the_meta_device_is_filled(mesh):
    plain, x = make_model(), torch.randn(5, 32)
    with torch.device("meta"):  # other blocks, as many
        model = make_model()
    shard(model, mesh).to_empty(device="cpu")
    state_dicts.set_model_state_dict(model, plain.state_dict(), options=FULL)
    assert torch.equal(model(x), plain(x))


def test_blocks_cannot_move(mesh):
    model = shard(make_model(), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(BlockSparseError, match=r"values of layer '0' must be an ordinary tensor.* got DTensor"):
        SparseOptimizer(model, optimizer, method=SET())
    with pytest.raises(BlockSparseError, match="must be an ordinary tensor to resize, got DTensor"):
        model[0].resize_to(torch.ones(model[0].pattern.grid_shape, dtype=torch.bool))


def test_sharding_after_the_sparse_optimizer_is_noticed_at_the_step(mesh):
    model = make_model()
    optimizer = SparseOptimizer(model, torch.optim.AdamW(model.parameters()), method=SET(interval=1))
    shard(model, mesh)
    model(torch.randn(4, 32)).sum().backward()
    with pytest.raises(BlockSparseError, match="got DTensor"):
        optimizer.step()
