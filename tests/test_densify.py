"""The densify plan, forced: every operator against dense float64 as in test_operators. Runs with ``--device cuda``."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, BLOCK_CASES, DTYPES, PATTERNS, Case, Operands, cases, dtype_id, make_operands
from hypothesis import given, settings
from hypothesis import strategies as st
from test_operators import STRIDES, assert_bitwise_equal, check_input_grad, check_linear, check_weight_grad
from torch import Tensor

from pytorch_block_sparse import BlockPattern, BlockSparseLinear, backends, ops
from pytorch_block_sparse.native import block_sparse_native

pytestmark = pytest.mark.usefixtures("poisoned_memory")

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
PATTERN_CASES = [Case((160, 256), (32, 32), pattern) for pattern in PATTERNS]
# Thread blocks copy 8 rows, threads 2 to 16 bytes, and 1024 block columns at a time.
VECTOR_CASES = [
    Case((61, 264), (16, 8), tokens=9),
    Case((40, 204), (13, 12), tokens=9),
    Case((30, 150), (9, 50), tokens=9),
    Case((21, 93), (3, 5), tokens=9),
    Case((18, 2500), (4, 1), "half", tokens=9),
    Case((10, 4100), (16, 2), "power-law-rows", tokens=9),
]


@pytest.fixture(autouse=True)
def always_densify(device):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    with backends.densify_plan("always"):
        yield


def densified(operator, *operands, **keywords) -> Tensor:
    result = operator(*operands, **keywords)
    assert block_sparse_native.last_plan() == "densify"
    return result


def run_all(o: Operands) -> list[Tensor]:
    """y, gelu(x Wᵀ), dx and dW."""
    return [
        densified(ops.linear, o.x, o.values, o.pattern, o.bias),
        densified(ops.linear, o.x, o.values, o.pattern, None, "gelu"),
        densified(ops.input_grad, o.dy, o.values, o.pattern),
        ops.weight_grad(o.dy, o.x, o.pattern),  # without blocks nothing runs
    ]


def check_all(results: list[Tensor], o: Operands) -> None:
    y, activated, dx, dw = results
    check_linear(y, o, o.bias)
    check_linear(activated, o, None, "gelu")
    check_input_grad(dx, o)
    check_weight_grad(dw, o)


@each_dtype
@pytest.mark.parametrize("case", VECTOR_CASES, ids=str)
def test_vectors(case, dtype, device):
    o = make_operands(case, dtype, device)
    check_all(run_all(o), o)


@each_dtype
@pytest.mark.parametrize("case", BLOCK_CASES + PATTERN_CASES, ids=str)
def test_products(case, dtype, device):
    o = make_operands(case, dtype, device)
    check_all(run_all(o), o)
    assert block_sparse_native.last_plan() == "densify"


@settings(max_examples=100)
@given(case=cases(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**16))
def test_any_problem(case, dtype, seed, device):
    torch.manual_seed(seed)
    if case.tokens:
        o = make_operands(case, dtype, device)
        check_all(run_all(o), o)


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_bias(activation, dtype, device):
    o = make_operands(Case((200, 168), (32, 32), tokens=50), dtype, device)
    check_linear(densified(ops.linear, o.x, o.values, o.pattern, o.bias, activation), o, o.bias, activation)


@each_dtype
def test_misaligned_values_and_gradient(dtype, device):
    """Values that begin one element into their memory are copied in narrow vectors."""
    o = make_operands(Case((200, 168), (32, 32)), dtype, device)
    memory = torch.cat((o.values.new_zeros(1), o.values.flatten()))
    shifted = replace(o, values=memory[1:].view_as(o.values))
    assert_bitwise_equal(run_all(shifted), run_all(o))


@each_dtype
@pytest.mark.parametrize("strides", STRIDES)
def test_strided_operands(strides, dtype, device):
    o = make_operands(Case((200, 168), (32, 32), tokens=50), dtype, device)
    check_all(run_all(replace(o, x=STRIDES[strides](o.x), dy=STRIDES[strides](o.dy))), o)


def test_expanded_operands(device):
    o = make_operands(Case((200, 168), (32, 32), tokens=9), torch.float32, device)
    whole = replace(o, x=o.x[:1].repeat(9, 1), dy=o.dy[:1].repeat(9, 1))
    check_all(run_all(replace(o, x=o.x[:1].expand(9, -1), dy=o.dy[:1].expand(9, -1))), whole)


@each_dtype
def test_no_tokens(dtype, device):
    o = make_operands(Case((200, 168), (32, 32), tokens=0), dtype, device)
    assert ops.linear(o.x, o.values, o.pattern).shape == (0, 200)
    assert torch.equal(ops.weight_grad(o.dy, o.x, o.pattern), torch.zeros_like(o.values))


def test_blocks_and_gradients_are_those_of_the_kernels(device):
    """The layer's whole step, which also runs on the backward's thread."""
    layer = BlockSparseLinear(160, 208, density=0.5, block_shape=(16, 16), device=device, dtype=torch.float64)
    x = torch.randn(40, 160, device=device, dtype=torch.float64, requires_grad=True)

    def step() -> list[Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))]

    ours = step()
    with backends.densify_plan("never"):
        expected = step()
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


@each_dtype
def test_bitwise_repeatable(dtype, device):
    o = make_operands(Case((640, 512), (32, 32), tokens=300), dtype, device)
    first = run_all(o)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(3):
        assert_bitwise_equal(run_all(o), first)
        with torch.cuda.stream(stream):
            elsewhere = run_all(o)
        torch.cuda.synchronize()
        assert_bitwise_equal(elsewhere, first)


def test_graph_replay_computes_on_new_data(device):
    o = make_operands(Case((200, 168), (32, 32), tokens=50), torch.bfloat16, device)
    run_all(o)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_all(o)
    o.x.normal_(), o.dy.normal_(), o.values.normal_()
    graph.replay()
    assert_bitwise_equal(captured, run_all(o))


def test_an_infinity_stays_in_its_token(device):
    o = make_operands(Case((200, 168), (32, 32), "half", 20), torch.float32, device)
    clean = densified(ops.linear, o.x, o.values, o.pattern)
    o.x[7, 3] = torch.inf
    y = densified(ops.linear, o.x, o.values, o.pattern)
    others = torch.arange(20, device=device) != 7
    assert torch.equal(y[others], clean[others])
    # Absent blocks are zeros, and zero times infinity is NaN, as in nn.Linear.
    absent = ~o.pattern.mask()[:, 0].repeat_interleave(32)[:200]
    assert absent.any() and y[7, absent.to(device)].isnan().all()


def test_auto_densifies_where_it_wins(device):
    pattern = BlockPattern.random((1024, 1024), 0.5, (24, 24))  # no tiled kernel takes such blocks
    x = torch.randn(2048, 1024, device=device, dtype=torch.bfloat16)
    values = torch.randn(pattern.nnz, 24, 24, device=device, dtype=torch.bfloat16)
    with backends.densify_plan("auto"):
        densified(ops.linear, x, values, pattern)
        ops.linear(x[:16], values, pattern)
        assert block_sparse_native.last_plan() == "sm80"
    with backends.densify_plan("never"):
        ops.linear(x, values, pattern)
        assert block_sparse_native.last_plan() == "sm80"


def test_without_memory_the_kernels_run(device):
    layer = BlockSparseLinear(16384, 16384, density=0.01, block_shape=(128, 128), device=device, dtype=torch.float32)
    x = torch.randn(16, 16384, device=device)
    with torch.no_grad(), backends.densify_plan("never"):
        expected = layer(x)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        with torch.no_grad():
            assert torch.equal(layer(x), expected)
        assert block_sparse_native.last_plan() in ("sm80", "sm90")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_log_names_each_choice_once():
    code = (
        "import torch; from pytorch_block_sparse import BlockSparseLinear as L\n"
        "layer = L(64, 64, device='cuda'); x = torch.randn(3, 64, device='cuda')\n"
        "with torch.no_grad(): layer(x), layer(x)"
    )
    environment = {**os.environ, "BLOCK_SPARSE_LOG": "plan", "BLOCK_SPARSE_DENSIFY": "always"}
    report = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    (line,) = (line for line in report.stderr.splitlines() if line.startswith("pytorch_block_sparse plan:"))
    assert "linear float32 T 3 O 64 I 64" in line and ": densify" in line
