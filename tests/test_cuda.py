"""What only a GPU has: streams, graphs, devices, memory. Runs with ``--device cuda``."""

from __future__ import annotations

import threading

import pytest
import torch

from pytorch_block_sparse import BlockPattern, BlockSparseLinear, ops


@pytest.fixture(autouse=True)
def needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")


@pytest.fixture
def operands(device):
    pattern = BlockPattern.random((256, 192), 0.4, (32, 32))
    x, dy = torch.randn(100, 192, device=device), torch.randn(100, 256, device=device)
    return x, dy, torch.randn(pattern.nnz, 32, 32, device=device), pattern


def run_all(x, dy, values, pattern):
    return (
        ops.linear(x, values, pattern),
        ops.input_grad(dy, values, pattern),
        ops.weight_grad(dy, x, pattern),
        ops.bias_grad(dy),
    )


def test_graph_replay_computes_on_new_data(operands):
    x, dy, values, pattern = operands
    run_all(*operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_all(*operands)
    x.normal_(), dy.normal_(), values.normal_()
    graph.replay()
    for ours, expected in zip(captured, run_all(x, dy, values, pattern), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("operator", range(3), ids=["linear", "input_grad", "weight_grad"])
def test_a_threads_first_call(operator, block, device):
    """As in a backward, which has a thread of its own: nothing there has bound a CUDA context yet."""
    pattern = BlockPattern.random((512, 512), 0.5, (block, block))
    x, dy, values = (
        torch.randn(shape, device=device, dtype=torch.bfloat16)
        for shape in ((600, 512), (600, 512), (pattern.nnz, block, block))
    )
    products = (
        lambda: ops.linear(x, values, pattern),
        lambda: ops.input_grad(dy, values, pattern),
        lambda: ops.weight_grad(dy, x, pattern),
    )
    results = []
    for _ in range(2):  # the first leaves freed memory behind: the second allocates without a call of the runtime
        thread = threading.Thread(target=lambda: results.append(products[operator]()))
        thread.start()
        thread.join()
    expected = products[operator]()
    assert len(results) == 2
    assert all(torch.equal(result, expected) for result in results)


def test_two_streams_at_once(operands):
    expected = run_all(*operands)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run_all(*operands))
    torch.cuda.synchronize()
    for result in results:
        for ours, one_stream in zip(result, expected, strict=True):
            assert torch.equal(ours, one_stream)


def test_a_device_that_is_not_current(operands):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, dy, values, pattern = operands
    expected = run_all(*operands)
    for ours, first in zip(
        run_all(x.to("cuda:1"), dy.to("cuda:1"), values.to("cuda:1"), pattern), expected, strict=True
    ):
        assert ours.device == torch.device("cuda:1")
        assert torch.equal(ours.to(first.device), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "features"), [(1, 40), (3000, 40), (3000, 1000), (70, 1000)], ids=str)
def test_bias_gradient_adds_in_one_order_whatever_the_alignment(tokens, features, dtype, device):
    dy = torch.randn(tokens, features, device=device).to(dtype)
    aligned = ops.bias_grad(dy)
    for pad in ((0, 1), (1, 0), (8, 8), (3, 6)):
        wider = torch.nn.functional.pad(dy, pad, value=torch.nan)
        assert torch.equal(ops.bias_grad(wider[:, pad[0] : pad[0] + features]), aligned)


def test_bias_gradient_of_more_elements_than_an_int32_counts(device):
    if torch.cuda.mem_get_info(device)[0] < 8 << 30:
        pytest.skip("needs 8 GB")
    dy = torch.ones(33000, 65544, device=device, dtype=torch.bfloat16)
    assert torch.equal(ops.bias_grad(dy), torch.full((65544,), 33000.0, device=device).bfloat16())


def test_bias_gradient_in_a_graph_of_many_replays(device):
    dy = torch.randn(5000, 512, device=device)
    expected = ops.bias_grad(dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = [ops.bias_grad(dy) for _ in range(3)]
    for _ in range(20):
        for tensor in sums:
            tensor.zero_()
        graph.replay()
        assert all(torch.equal(tensor, expected) for tensor in sums)


@pytest.mark.usefixtures("kernels_on_blocks")
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_no_dense_sized_temporary(block, device):
    layer = BlockSparseLinear(4096, 4096, density=0.05, block_shape=(block, block), device=device, dtype=torch.bfloat16)
    x = torch.randn(256, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    layer.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(x).sum().backward()
    # Outputs and gradients of the tokens, the values' gradient, its float32 partial sums: far below the dense weight.
    assert torch.cuda.max_memory_allocated() - before < 4096 * 4096 * 2


def test_tf32_is_what_pytorch_allows(operands):
    x, _, values, pattern = operands
    reference = ops.linear(x.double(), values.double(), pattern)
    errors = {}
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        errors[precision] = (ops.linear(x, values, pattern) - reference).abs().max().item()
    torch.set_float32_matmul_precision("highest")
    assert errors["highest"] < 1e-4 < errors["high"] < 0.2
