"""Gradients of every order, and which operators run to get them."""

from __future__ import annotations

import pytest
import torch
from cases import ACTIVATIONS, PATTERNS
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from pytorch_block_sparse import BlockPattern, BlockSparseLinear, ops

NAMESPACE = "pytorch_block_sparse"

# Small, since gradcheck runs an operator once for every element. Edges on both sides but in the first.
each_pattern = pytest.mark.parametrize(
    ("kind", "shape", "block"),
    [
        ("half", (8, 12), (4, 4)),
        ("permuted", (7, 9), (3, 4)),
        ("empty-rows", (7, 5), (2, 2)),
        ("empty-columns", (5, 7), (2, 3)),
        ("full", (3, 5), (4, 8)),
        ("none", (4, 4), (2, 2)),
    ],
    ids=["fitting", "edges", "empty-rows", "empty-columns", "block-larger-than-matrix", "no-blocks"],
)


def double(*sizes: int, device: torch.device, grad: bool = True) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.float64, device=device, requires_grad=grad)


def operator_calls(kind: str, shape: tuple[int, int], block: tuple[int, int], device: torch.device) -> dict:
    """name -> (function of differentiable tensors, those tensors); three tokens in two leading dimensions."""
    pattern = PATTERNS[kind](shape, block)
    x, dy = double(3, 1, shape[1], device=device), double(3, 1, shape[0], device=device)
    values, bias = double(pattern.nnz, *block, device=device), double(shape[0], device=device)
    return {
        "linear": (lambda *tensors: ops.linear(tensors[0], tensors[1], pattern, tensors[2]), (x, values, bias)),
        "linear-no-bias": (lambda *tensors: ops.linear(*tensors, pattern), (x, values)),
        "input_grad": (lambda *tensors: ops.input_grad(*tensors, pattern), (dy, values)),
        "weight_grad": (lambda *tensors: ops.weight_grad(*tensors, pattern), (dy, x)),
        "bias_grad": (ops.bias_grad, (dy,)),
    }


each_operator = pytest.mark.parametrize(
    "name", ["linear", "linear-no-bias", "input_grad", "weight_grad", "bias_grad"], ids=str
)


@each_pattern
@each_operator
def test_first_order(name, kind, shape, block, device):
    function, tensors = operator_calls(kind, shape, block, device)[name]
    assert gradcheck(function, tensors)


@each_pattern
@each_operator
def test_second_order(name, kind, shape, block, device):
    function, tensors = operator_calls(kind, shape, block, device)[name]
    assert gradgradcheck(function, tensors)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation, device):
    pattern = PATTERNS["permuted"]((7, 9), (3, 4))
    tensors = double(3, 9, device=device), double(pattern.nnz, 3, 4, device=device), double(7, device=device)

    def function(x, values, bias):
        return ops.linear(x, values, pattern, bias, activation)

    assert gradcheck(function, tensors)
    assert gradgradcheck(function, tensors)


def test_third_order(device):
    pattern = PATTERNS["half"]((4, 6), (2, 3))
    tensors = double(2, 6, device=device), double(pattern.nnz, 2, 3, device=device)

    def gradient(x, values):
        y = ops.linear(x, values, pattern).pow(3).sum()
        return torch.autograd.grad(y, (x, values), create_graph=True)

    assert gradgradcheck(gradient, tensors)


def test_no_tokens(device):
    layer = BlockSparseLinear(12, 8, block_shape=(4, 4), device=device)
    x = torch.randn(0, 12, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 12)
    assert torch.equal(layer.values.grad, torch.zeros_like(layer.values))
    assert torch.equal(layer.bias.grad, torch.zeros_like(layer.bias))


class OperatorCalls(TorchDispatchMode):
    """The names of our operators that ran below autograd, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == NAMESPACE:
            self.names.append(function.__name__.removesuffix(".default"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        ({"x", "values", "bias"}, ["bias_grad", "input_grad", "weight_grad"]),
        ({"x"}, ["input_grad"]),
        ({"values"}, ["weight_grad"]),
        ({"bias"}, ["bias_grad"]),
        ({"x", "bias"}, ["bias_grad", "input_grad"]),
        ({"values", "bias"}, ["bias_grad", "weight_grad"]),
    ],
    ids=lambda choice: "+".join(sorted(choice)),
)
def test_only_the_needed_operators_run(needed, expected, device):
    layer = BlockSparseLinear(12, 8, block_shape=(4, 4), device=device)
    x = torch.randn(5, 12, device=device, requires_grad="x" in needed)
    layer.values.requires_grad_("values" in needed)
    layer.bias.requires_grad_("bias" in needed)
    y = layer(x)
    with OperatorCalls() as calls:
        y.sum().backward()
    assert sorted(calls.names) == expected
    found = {
        name for name, tensor in (("x", x), ("values", layer.values), ("bias", layer.bias)) if tensor.grad is not None
    }
    assert found == needed


@pytest.mark.parametrize("target", ["x", "values", "bias"])
def test_only_what_grad_asks_for_runs(target, device):
    layer = BlockSparseLinear(12, 8, block_shape=(4, 4), device=device)
    x = torch.randn(5, 12, device=device, requires_grad=True)
    y = layer(x)
    with OperatorCalls() as calls:
        torch.autograd.grad(y.sum(), x if target == "x" else getattr(layer, target))
    assert calls.names == [{"x": "input_grad", "values": "weight_grad", "bias": "bias_grad"}[target]]


def saved_by(layer: BlockSparseLinear, x: torch.Tensor) -> set[str]:
    """Which of x and values a forward keeps for its backward."""
    names = {x.data_ptr(): "x", layer.values.data_ptr(): "values"}
    kept = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.add(names.get(tensor.data_ptr())), tensor)[1], lambda tensor: tensor
    ):
        layer(x)
    return kept & {"x", "values"}


@pytest.mark.parametrize(
    ("x_needs", "values_need", "kept"),
    [(True, True, {"x", "values"}), (True, False, {"values"}), (False, True, {"x"}), (False, False, set())],
    ids=["all", "frozen-values", "first-layer", "bias-only"],
)
def test_what_a_forward_keeps(x_needs, values_need, kept, device):
    layer = BlockSparseLinear(12, 8, block_shape=(4, 4), device=device)
    layer.values.requires_grad_(values_need)
    assert saved_by(layer, torch.randn(5, 12, device=device, requires_grad=x_needs)) == kept


def test_no_graph_without_need(device):
    layer = BlockSparseLinear(12, 8, block_shape=(4, 4), device=device).requires_grad_(False)
    assert not layer(torch.randn(5, 12, device=device)).requires_grad
    layer.requires_grad_()
    with torch.no_grad():
        assert not layer(torch.randn(5, 12, device=device, requires_grad=True)).requires_grad
    with torch.inference_mode():
        assert layer(torch.randn(5, 12, device=device)).is_inference()


@pytest.mark.parametrize("subset", [("x",), ("values",), ("x", "values")], ids="+".join)
def test_second_order_over_a_subset(subset, device):
    """A first backward for some inputs only, recorded, must still lead to every input."""
    pattern = PATTERNS["permuted"]((7, 9), (3, 4))
    x, values = double(3, 9, device=device), double(pattern.nnz, 3, 4, device=device)
    weight = values.detach().requires_grad_()
    tensors, dense_tensors = {"x": x, "values": values}, {"x": x, "values": weight}

    def penalty(y, chosen):
        first = torch.autograd.grad(y.pow(2).sum(), [chosen[name] for name in subset], create_graph=True)
        return sum(gradient.pow(2).sum() for gradient in first)

    ours = torch.autograd.grad(penalty(ops.linear(x, values, pattern), tensors), (x, values))
    rows, cols = pattern.block_coords.long().unbind(1)
    grid = weight.new_zeros(3, 3, 3, 4).index_put((rows.to(device), cols.to(device)), weight)
    dense = grid.transpose(1, 2).reshape(9, 12)[:7, :9]
    expected = torch.autograd.grad(penalty(x @ dense.t(), dense_tensors), (x, weight))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_flow_through_operators_of_a_backward(device):
    """weight_grad's own output, used as values, differentiates back to its operands."""
    pattern = BlockPattern.banded((6, 6), (2, 2))
    x, dy = double(3, 6, device=device), double(3, 6, device=device)

    def two_steps(x, dy):
        return ops.linear(x, ops.weight_grad(dy, x, pattern), pattern)

    assert gradcheck(two_steps, (x, dy))


def test_expanded_gradient(device):
    layer = BlockSparseLinear(12, 8, block_shape=(4, 4), device=device)
    x = torch.randn(5, 12, device=device, requires_grad=True)
    layer(x).sum().backward()  # its gradient is one number, expanded
    ours = x.grad.clone(), layer.values.grad.clone()
    x.grad = layer.values.grad = None
    layer(x).backward(torch.ones(5, 8, device=device))
    assert torch.equal(x.grad, ours[0]) and torch.equal(layer.values.grad, ours[1])


def test_transposed_gradient(device):
    layer = BlockSparseLinear(12, 8, block_shape=(4, 4), device=device)
    x, dy = torch.randn(5, 12, device=device, requires_grad=True), torch.randn(8, 5, device=device)
    layer(x).t().backward(dy)
    ours = x.grad.clone(), layer.values.grad.clone()
    x.grad = layer.values.grad = None
    layer(x).backward(dy.t().contiguous())
    assert torch.equal(x.grad, ours[0]) and torch.equal(layer.values.grad, ours[1])
