"""Main gradients: weight gradients in float32, and added to a tensor by the operator and by the layer's backward."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from bounds import assert_within_bound, by_slot
from cases import DTYPES, Case, dtype_id, make_operands, past_edges
from torch import nn

from pytorch_block_sparse import BlockSparseError, BlockSparseLinear, SparseOptimizer, ops, reference
from pytorch_block_sparse.training import SET, CubicDensity, MagnitudePruning, RigL

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
# Unaligned, edge, long enough to be cut into token ranges; with and without a block that the matrix cuts.
each_case = pytest.mark.parametrize(
    "case",
    [
        Case((200, 168), (16, 16), tokens=70),
        Case((96, 160), (16, 16), "half", tokens=1300),
        Case((96, 160), (32, 32), tokens=50),
        Case((130, 77), (32, 32), tokens=600),
        Case((192, 128), (64, 64), "half", tokens=1200),
        Case((256, 384), (128, 128), tokens=140),
        Case((50, 33), (7, 5), tokens=21),
        Case((64, 64), (16, 16), "none", tokens=5),
        Case((96, 160), (32, 32), tokens=0),
    ],
    ids=str,
)


def sum_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What a weight gradient of these operands can be written in."""
    return (dtype, torch.float32) if dtype.itemsize == 2 else (dtype,)


@each_dtype
@each_case
@pytest.mark.usefixtures("poisoned_memory")
def test_weight_grad_in_float32(case, dtype, device):
    o = make_operands(case, dtype, device)
    for out_dtype in sum_dtypes(dtype):
        dw = ops.weight_grad(o.dy, o.x, o.pattern, out_dtype)
        results = (
            dw,
            reference.stored_blocks(o.dy.t() @ o.x, o.pattern),
            reference.weight_grad(o.dy, o.x, o.pattern),
            reference.weight_grad(o.dy.abs(), o.x.abs(), o.pattern),
        )
        assert dw.dtype == out_dtype
        if out_dtype == dtype:
            assert_within_bound(*(by_slot(result) for result in results))
            continue
        # Matrix units cut what they add to a float32 accumulator, which float32's own bound does not allow for.
        error = (dw - results[2]).abs().flatten(1)
        assert (error <= 2**-17 * results[2].abs().flatten(1).amax(1, keepdim=True)).all()
        assert torch.equal(dw.to(dtype), ops.weight_grad(o.dy, o.x, o.pattern))  # only the last rounding differs


@each_dtype
@each_case
@pytest.mark.usefixtures("poisoned_memory", "kernels_on_blocks")  # a densified gradient sums in another order
def test_accumulation_adds_the_gradient_once(case, dtype, device):
    o = make_operands(case, dtype, device)
    for out_dtype in sum_dtypes(dtype):
        before = torch.randn_like(o.values, dtype=out_dtype)
        before[past_edges(o.pattern).to(device)] = 0
        out = before.clone()
        assert ops.weight_grad_accumulate_(out, o.dy, o.x, o.pattern) is out
        widest = sum_dtypes(dtype)[-1]
        expected = before.to(widest) + ops.weight_grad(o.dy, o.x, o.pattern, widest)
        assert torch.equal(out, expected.to(out_dtype))


@each_dtype
def test_accumulation_leaves_what_lies_past_the_edges(dtype, device):
    o = make_operands(Case((50, 33), (7, 5), tokens=21), dtype, device)
    outside = past_edges(o.pattern).to(device)
    out = torch.ones_like(o.values).masked_fill(~outside, 0)
    ops.weight_grad_accumulate_(out, o.dy, o.x, o.pattern)
    assert torch.equal(out[outside], torch.ones_like(out[outside]))


def test_many_small_gradients_are_not_rounded_away(device):
    """256 gradients of 2^-9 each: in bfloat16 the sum stays at 1."""
    case = Case((64, 64), (16, 16), "full", tokens=1)
    pattern = make_operands(case, torch.bfloat16).pattern
    dy = torch.full((1, 64), 2.0**-9, device=device, dtype=torch.bfloat16)
    x = torch.ones(1, 64, device=device, dtype=torch.bfloat16)
    out = torch.ones(pattern.nnz, 16, 16, device=device)
    for _ in range(256):
        ops.weight_grad_accumulate_(out, dy, x, pattern)
    assert torch.equal(out, torch.full_like(out, 1.5))


def test_accumulation_is_bitwise_repeatable_and_counts_as_a_change(device):
    o = make_operands(Case((192, 128), (64, 64), tokens=1500), torch.bfloat16, device)
    results = []
    for _ in range(3):
        out = torch.zeros_like(o.values, dtype=torch.float32)
        version = out._version
        ops.weight_grad_accumulate_(out, o.dy, o.x, o.pattern)
        assert out._version > version
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_unaligned_sum(device):
    """A view into a larger buffer need not begin on a 16-byte boundary."""
    o = make_operands(Case((96, 160), (32, 32), tokens=50), torch.bfloat16, device)
    buffer = torch.zeros(o.values.numel() + 1, device=device)
    out = buffer[1:].view(o.values.shape)
    ops.weight_grad_accumulate_(out, o.dy, o.x, o.pattern)
    torch.testing.assert_close(out, ops.weight_grad(o.dy, o.x, o.pattern, torch.float32), rtol=1e-4, atol=1e-4)
    assert buffer[0] == 0


def test_derivative_of_a_float32_weight_gradient(device):
    o = make_operands(Case((50, 33), (7, 5), tokens=21), torch.bfloat16, device)
    dy, x = o.dy.requires_grad_(), o.x.requires_grad_()
    ops.weight_grad(dy, x, o.pattern, torch.float32).square().sum().backward()
    ours = dy.grad, x.grad
    dw = ops.weight_grad(o.dy.detach(), o.x.detach(), o.pattern, torch.float32).bfloat16()
    assert torch.equal(ours[0], ops.linear(x.detach(), 2 * dw, o.pattern))
    assert torch.equal(ours[1], ops.input_grad(dy.detach(), 2 * dw, o.pattern))


def test_accumulation_has_no_derivative(device):
    o = make_operands(Case((50, 33), (7, 5), tokens=21), torch.float32, device)
    with pytest.raises(BlockSparseError, match="weight_grad_accumulate_ has no derivative"):
        ops.weight_grad_accumulate_(torch.zeros_like(o.values), o.dy.requires_grad_(), o.x, o.pattern)


# The layer


def make_layer(device: torch.device, dtype: torch.dtype = torch.float32, **kwargs) -> BlockSparseLinear:
    return BlockSparseLinear(40, 56, block_shape=(16, 16), device=device, dtype=dtype, **kwargs)


@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
@each_dtype
def test_backward_adds_to_main_grad(dtype, activation, device):
    layer = make_layer(device, dtype, activation=activation)
    plain = copy.deepcopy(layer)
    layer.accumulate_main_grad()
    assert layer.main_grad is layer.values.main_grad
    assert layer.main_grad.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = torch.zeros_like(layer.main_grad)
    for _ in range(3):
        x = torch.randn(2, 9, 40, device=device).to(dtype).requires_grad_()
        y, plain_y = layer(x), plain(x)
        assert torch.equal(y, plain_y)
        dy, before = torch.randn_like(y), layer.main_grad.clone()
        dx, db = torch.autograd.grad(y, (x, layer.bias), dy, retain_graph=True)
        ours = torch.autograd.grad(plain_y, (x, plain.bias), dy, retain_graph=True)
        assert torch.equal(dx, ours[0]) and torch.equal(db, ours[1])
        assert torch.equal(layer.main_grad, before)  # the values were not asked for
        y.backward(dy)
        if activation is None:
            expected += ops.weight_grad(dy, x.detach(), layer.pattern, layer.main_grad.dtype)
        else:
            expected += torch.autograd.grad(plain_y, plain.values, dy)[0]
    assert layer.values.grad is None
    tolerance = {} if activation is None or dtype.itemsize > 2 else {"rtol": 2e-2, "atol": 2e-1}
    torch.testing.assert_close(layer.main_grad, expected, **tolerance)
    layer.zero_main_grad()
    assert not layer.main_grad.any()


def test_off_again_gives_the_usual_gradient(device):
    layer, x = make_layer(device), torch.randn(9, 40, device=device)
    layer(x).sum().backward()
    usual = layer.values.grad.clone()
    layer.accumulate_main_grad()
    layer(x).sum().backward()
    assert torch.equal(layer.values.grad, usual)
    torch.testing.assert_close(layer.main_grad, usual)
    layer.accumulate_main_grad(False)
    assert layer.main_grad is None and not hasattr(layer.values, "main_grad")
    layer.zero_main_grad()
    layer(x).sum().backward()
    torch.testing.assert_close(layer.values.grad, 2 * usual)


def test_two_forwards_before_their_backwards(device):
    layer, x = make_layer(device), torch.randn(9, 40, device=device)
    layer.accumulate_main_grad()
    layer(x).sum().backward()
    once = layer.main_grad.clone()
    first, second = layer(x), layer(x)
    first.sum().backward()
    second.sum().backward()
    torch.testing.assert_close(layer.main_grad, 3 * once)


def test_a_tensor_of_the_users_is_added_to(device):
    layer, x = make_layer(device, torch.bfloat16), torch.randn(9, 40, device=device, dtype=torch.bfloat16)
    buffer = torch.zeros(1000 + layer.values.numel(), device=device)
    layer.accumulate_main_grad(main_grad=buffer[1000:].view(layer.values.shape))
    layer(x).sum().backward()
    assert not buffer[:1000].any() and buffer[1000:].any()
    in_bfloat16 = torch.zeros_like(layer.values.detach())
    layer.accumulate_main_grad(main_grad=in_bfloat16)
    layer(x).sum().backward()
    assert layer.main_grad is in_bfloat16 and in_bfloat16.any()


@pytest.mark.parametrize("target", ["values", "x", "both"])
def test_create_graph_is_an_error_that_changes_nothing(target, device):
    layer, x = make_layer(device), torch.randn(9, 40, device=device, requires_grad=True)
    layer.accumulate_main_grad()
    inputs = {"values": [layer.values], "x": [x], "both": [x, layer.values]}[target]
    with pytest.raises(ValueError, match="create_graph must be False"):
        torch.autograd.grad(layer(x).square().sum(), inputs, create_graph=True, allow_unused=True)
    assert not layer.main_grad.any()


def test_frozen_values_accumulate_nothing(device):
    layer, x = make_layer(device), torch.randn(9, 40, device=device, requires_grad=True)
    layer.accumulate_main_grad()
    layer.values.requires_grad_(False)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)  # a frozen layer has every order
    dx.sum().backward()
    assert not layer.main_grad.any()
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_under_autocast(device):
    layer, x = make_layer(device), torch.randn(9, 40, device=device, requires_grad=True)
    layer.accumulate_main_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert layer.values.grad is None and x.grad.dtype == torch.float32
    assert torch.equal(layer.main_grad, ops.weight_grad(dy, x.detach().bfloat16(), layer.pattern, torch.float32))


def test_under_checkpointing(device):
    layer, x = make_layer(device), torch.randn(9, 40, device=device, requires_grad=True)
    layer.accumulate_main_grad()
    layer(x).square().sum().backward()
    once = layer.main_grad.clone()
    for reentrant in (False, True):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(layer.main_grad, 3 * once)


def train(model: nn.Module, call: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    for layer in model.modules():
        if isinstance(layer, BlockSparseLinear):
            layer.zero_main_grad()
    model.zero_grad()
    for x in inputs:
        call(x).square().sum().backward()
    return [
        tensor
        for layer in model.modules()
        if isinstance(layer, BlockSparseLinear)
        for tensor in (layer.main_grad.clone(), layer.bias.grad)
    ]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, device, fresh_compiler):
    model = nn.Sequential(
        BlockSparseLinear(40, 56, block_shape=(16, 16), activation="relu", device=device),
        BlockSparseLinear(56, 24, block_shape=(8, 8), device=device),
    )
    for layer in model:
        layer.accumulate_main_grad()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    inputs = [torch.randn(9, 40, device=device) for _ in range(3)]
    for _ in range(2):
        ours, expected = train(model, compiled, inputs), train(model, model, inputs)
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    model[0].accumulate_main_grad(False)  # a guard: compiled code does not outlive the switch
    model.zero_grad()
    compiled(inputs[0]).sum().backward()
    assert model[0].values.grad is not None and model[1].values.grad is None


# What becomes of it


def test_state_dict_and_copies(device):
    layer, x = make_layer(device), torch.randn(9, 40, device=device)
    layer.accumulate_main_grad()
    layer(x).sum().backward()
    assert set(layer.state_dict()) == {"values", "bias", "block_coords"}
    twin = copy.deepcopy(layer)
    assert layer.main_grad.any() and not twin.main_grad.any()
    twin(x).sum().backward()
    assert torch.equal(twin.main_grad, layer.main_grad)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).main_grad, layer.main_grad)
    assert copy.copy(layer).main_grad is layer.main_grad


@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
@pytest.mark.parametrize("density", [0.5, 0.25], ids=["same-nnz", "other-nnz"])
def test_loading(density, assign, device):
    layer, x = make_layer(device), torch.randn(9, 40, device=device)
    layer.accumulate_main_grad()
    layer(x).sum().backward()
    before = layer.main_grad
    state = {name: t.clone() for name, t in make_layer(device, density=density).state_dict().items()}
    layer.load_state_dict(state, assign=assign)
    if density == 0.5:
        assert layer.main_grad is before
    else:
        assert layer.main_grad.shape == layer.values.shape and not layer.main_grad.any()
    layer.zero_main_grad()
    layer(x).sum().backward()
    assert layer.main_grad.any() and layer.values.grad is None


def test_moving(device):
    layer = make_layer("cpu")
    layer.accumulate_main_grad()
    layer.main_grad.fill_(2)
    layer.to(device)
    assert layer.main_grad.device == layer.values.device and (layer.main_grad == 2).all()
    before = layer.main_grad
    layer.bfloat16()
    assert layer.main_grad is before  # float32 still
    layer.double()
    assert layer.main_grad.dtype == torch.float64 and (layer.main_grad == 2).all()
    layer.float()
    assert layer.main_grad.dtype == torch.float32
    layer.to("meta").to_empty(device=device)
    assert layer.main_grad.device == layer.values.device and not layer.main_grad.any()


def test_resizing_starts_at_zero(device):
    layer = make_layer(device)
    layer.accumulate_main_grad()
    layer.main_grad.fill_(2)
    layer.resize_to(layer.pattern.mask() & (torch.arange(3) < 2))
    assert layer.main_grad.shape == layer.values.shape and not layer.main_grad.any()


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (lambda values: values.detach()[:1], "main_grad must be .* as values"),
        (lambda values: torch.zeros_like(values).half(), "main_grad must be of dtype torch.float32"),
        (lambda values: torch.zeros_like(values, device="meta"), "main_grad must be on the device of values"),
        (lambda values: torch.zeros_like(values).transpose(1, 2), "main_grad must be contiguous"),
        (lambda values: torch.zeros_like(values, requires_grad=True), "main_grad must be a tensor that does not"),
        (lambda values: [0.0], "main_grad must be a tensor"),
    ],
    ids=["shape", "dtype", "device", "strides", "requires-grad", "list"],
)
def test_what_does_not_fit_is_refused(main_grad, message, device):
    layer = make_layer(device)
    with pytest.raises(BlockSparseError, match=message):
        layer.accumulate_main_grad(main_grad=main_grad(layer.values))
    assert layer.main_grad is None and not hasattr(layer.values, "main_grad")


def test_values_that_are_no_ordinary_tensor_are_refused(device):
    """As FSDP's shards."""

    class Sharded(torch.Tensor):
        pass

    layer = make_layer(device)
    layer.values = nn.Parameter(layer.values.detach().as_subclass(Sharded))
    with pytest.raises(BlockSparseError, match="values must be an ordinary tensor"):
        layer.accumulate_main_grad()


def test_a_forgotten_tensor_is_an_error(device):
    layer = make_layer(device)
    layer.accumulate_main_grad()
    layer.values = nn.Parameter(layer.values.detach().clone())
    with pytest.raises(BlockSparseError, match=r"values\.main_grad must be a tensor"):
        layer(torch.randn(3, 40, device=device))
    with pytest.raises(BlockSparseError, match="main_grad must be None where enabled is False"):
        layer.accumulate_main_grad(False, main_grad=torch.zeros_like(layer.values))


# Training the pattern


def train_pattern(layer: BlockSparseLinear, method: object, steps: int, **kwargs) -> SparseOptimizer:
    """Micro-batches of two; the optimizer steps from the main gradient."""
    generator = torch.Generator().manual_seed(1)
    optimizer = SparseOptimizer(
        layer,
        torch.optim.Adam(layer.parameters(), lr=0.01),
        method=method,
        generator=torch.Generator().manual_seed(2),
        **kwargs,
    )
    for _ in range(steps):
        for _ in range(2):
            layer(torch.randn(8, 40, generator=generator).to(layer.values)).square().mean().backward()
        if layer.main_grad is not None:
            layer.values.grad = layer.main_grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.last_update and layer.main_grad is not None:
            moved = (layer.values == 0).all((1, 2))
            assert not layer.main_grad[moved].any()
        layer.zero_main_grad()
    return optimizer


@pytest.mark.parametrize(
    ("method", "schedule"),
    [
        (RigL(stop=100, interval=2, fraction=0.5), {}),
        (SET(stop=100, interval=2, fraction=0.5), {}),
        (MagnitudePruning(interval=2), {"schedule": CubicDensity(final=0.2, end=6)}),
    ],
    ids=["rigl", "set", "pruning"],
)
def test_pattern_training_goes_as_with_the_usual_gradient(method, schedule, device):
    layer = make_layer(device)
    plain = copy.deepcopy(layer)
    layer.accumulate_main_grad()
    train_pattern(layer, method, 6, **schedule)
    train_pattern(plain, method, 6, **schedule)
    assert torch.equal(layer.block_coords, plain.block_coords)
    torch.testing.assert_close(layer.values, plain.values)
