"""torch.compile and torch.export: equal to eager, whole graphs, few recompilations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from pytorch_block_sparse import BlockPattern, BlockSparseLinear

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def make_model(device: torch.device) -> nn.Sequential:
    return nn.Sequential(
        BlockSparseLinear(64, 96, block_shape=(16, 16), activation="gelu", device=device),
        nn.LayerNorm(96, device=device),
        BlockSparseLinear(96, 40, block_shape=(16, 16), bias=False, device=device),
    )


def run(model: nn.Module, call: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output of ``call`` and every gradient of ``model``'s parameters and x."""
    x = x.detach().requires_grad_()
    y = call(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def assert_equals_eager(model: nn.Module, compiled: nn.Module, x: torch.Tensor) -> None:
    for one, other in zip(run(model, compiled, x), run(model, model, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_equals_eager_with_gradients(device):
    model = make_model(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equals_eager(model, compiled, torch.randn(4, 10, 64, device=device))


def test_inductor(device):
    """One layer, since what inductor adds is C++ of its own that takes long to compile."""
    layer = BlockSparseLinear(64, 96, block_shape=(16, 16), activation="relu", device=device)
    compiled = torch.compile(layer, fullgraph=True)
    assert_equals_eager(layer, compiled, torch.randn(12, 64, device=device))


def test_without_gradients(device):
    model, x = make_model(device), torch.randn(10, 64, device=device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_under_autocast(device):
    model, x = make_model(device), torch.randn(10, 64, device=device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y, expected = compiled(x), model(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected)


def test_any_number_of_tokens_in_two_graphs(device):
    """The first token count compiles for itself, the second for any."""
    model = make_model(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for tokens in (12, 7, 33, 100, 64, 3):
        assert_equals_eager(model, compiled, torch.randn(tokens, 64, device=device))
    assert counter.frame_count <= 2


def test_twenty_rewires_recompile_once_at_most(device):
    layer = BlockSparseLinear(64, 96, block_shape=(16, 16), device=device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    x = torch.randn(12, 64, device=device)
    assert_equals_eager(layer, compiled, x)
    patterns = {layer.pattern}
    for _ in range(20):
        free = (~layer.pattern.mask()).nonzero()
        layer.rewire(torch.randperm(12)[:3], free[torch.randperm(len(free))[:3]], torch.randn(3, 16, 16))
        patterns.add(layer.pattern)
        assert_equals_eager(layer, compiled, x)
    assert len(patterns) == 21
    assert counter.frame_count <= 2


def test_rewire_to_between_calls(device):
    layer = BlockSparseLinear(64, 96, block_shape=(16, 16), device=device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(12, 64, device=device)
    for _ in range(3):
        assert_equals_eager(layer, compiled, x)
        layer.rewire_to(BlockPattern.random((96, 64), 0.5, (16, 16)).mask())


@pytest.mark.parametrize("density", [0.5, 0.25], ids=["same-nnz", "other-nnz"])
@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
def test_loaded_state_dict_is_used(density, assign, device):
    layer = BlockSparseLinear(64, 96, block_shape=(16, 16), device=device)
    other = BlockSparseLinear(64, 96, block_shape=(16, 16), density=density, device=device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(12, 64, device=device)
    assert_equals_eager(layer, compiled, x)
    compiled.load_state_dict({f"_orig_mod.{name}": t.clone() for name, t in other.state_dict().items()}, assign=assign)
    torch.testing.assert_close(compiled(x), other(x))
    assert_equals_eager(layer, compiled, x)


def test_coordinates_written_in_place_are_used(device):
    """A compiled forward cannot look at the buffer's data; the next use of the layer outside it does."""
    layer = BlockSparseLinear(64, 96, block_shape=(16, 16), device=device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(12, 64, device=device)
    compiled(x)
    layer.block_coords.copy_(BlockPattern.random((96, 64), 0.5, (16, 16)).block_coords)
    expected = layer(x)
    torch.testing.assert_close(compiled(x), expected)


def test_two_copies_share_a_graph_and_keep_their_patterns(device):
    first = BlockSparseLinear(64, 96, block_shape=(16, 16), device=device)
    second = copy.deepcopy(first)
    second.rewire_to(BlockPattern.random((96, 64), 0.5, (16, 16)).mask())
    x = torch.randn(12, 64, device=device)
    for layer in (first, second, first):
        assert_equals_eager(layer, torch.compile(layer, backend="aot_eager", fullgraph=True), x)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_export(dynamic, device):
    model, x = make_model(device).eval(), torch.randn(12, 64, device=device)
    shapes = ({0: torch.export.Dim("tokens", min=2, max=1000)},) if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    names = [str(node.target) for node in program.graph.nodes]
    assert sum("pytorch_block_sparse" in name for name in names) == 2
    exported = program.module()
    for tokens in (12, 50) if dynamic else (12,):
        x = torch.randn(tokens, 64, device=device)
        torch.testing.assert_close(exported(x), model(x), rtol=1e-4, atol=1e-5)
