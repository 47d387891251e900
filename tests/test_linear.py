"""BlockSparseLinear as a module: calling, making, converting, moving, copying, training, rewiring."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from cases import DTYPES, dtype_id, past_edges, permuted
from torch import nn
from torch.nn import functional

from pytorch_block_sparse import BlockPattern, BlockSparseError, BlockSparseLinear, BlockSparseMatrix

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


def make_layer(device: torch.device, dtype: torch.dtype = torch.float64, **kwargs) -> BlockSparseLinear:
    """9 -> 14 in blocks of 4 x 4, with edges on both sides and slots out of order."""
    pattern = permuted(BlockPattern.random((14, 9), 0.5, (4, 4)))
    return BlockSparseLinear(9, 14, pattern=pattern, device=device, dtype=dtype, **kwargs)


def dense_weight(layer: BlockSparseLinear) -> torch.Tensor:
    """W [O, I] by a loop over the blocks, differentiable."""
    height, width = layer.block_shape
    rows, cols = layer.pattern.grid_shape
    zero = layer.values.new_zeros(height, width)
    blocks = {tuple(coord): layer.values[slot] for slot, coord in enumerate(layer.block_coords.tolist())}
    lines = [torch.cat([blocks.get((row, col), zero) for col in range(cols)], 1) for row in range(rows)]
    return torch.cat(lines)[: layer.out_features, : layer.in_features]


def assert_same_function(layer: BlockSparseLinear, other: nn.Module) -> None:
    x = torch.randn(5, layer.in_features, dtype=layer.values.dtype, device=layer.values.device)
    torch.testing.assert_close(layer(x), other(x))


# Calling


@pytest.mark.parametrize("leading", [(), (1,), (0,), (6,), (2, 3), (2, 0, 3), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_forward_and_gradients_for_any_leading_dimensions(leading, bias, device):
    layer = make_layer(device, bias=bias)
    x = torch.randn(*leading, 9, dtype=torch.float64, device=device, requires_grad=True)
    dy = torch.randn(*leading, 14, dtype=torch.float64, device=device)
    parameters = list(layer.parameters())
    y = layer(x)
    ours = torch.autograd.grad(y, [x, *parameters], dy)
    expected_y = functional.linear(x, dense_weight(layer), layer.bias)
    expected = torch.autograd.grad(expected_y, [x, *parameters], dy)
    torch.testing.assert_close(y, expected_y)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activation(activation, device):
    layer = make_layer(device, activation=activation)
    plain = BlockSparseLinear(9, 14, pattern=layer.pattern, device=device, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    expected = {
        "relu": nn.ReLU(),
        "gelu": nn.GELU(),
        "gelu_tanh": nn.GELU(approximate="tanh"),
        "silu": nn.SiLU(),
    }[activation]
    assert_same_function(layer, nn.Sequential(plain, expected))
    with torch.no_grad():
        assert_same_function(layer, nn.Sequential(plain, expected))


@pytest.mark.parametrize("nnz", [0, 12], ids=["no-blocks", "full"])
def test_extreme_patterns(nnz, device):
    pattern = BlockPattern.random((14, 9), block_shape=(4, 4), nnz=nnz)
    layer = BlockSparseLinear(9, 14, pattern=pattern, device=device, dtype=torch.float64)
    x = torch.randn(5, 9, dtype=torch.float64, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert_same_function(layer, lambda x: functional.linear(x, dense_weight(layer), layer.bias))
    assert layer.values.grad.shape == layer.values.shape
    if nnz == 0:
        assert torch.equal(layer(x), layer.bias.expand(5, 14)) and not x.grad.any()


# Making


def test_defaults_are_those_of_2020(device):
    layer = BlockSparseLinear(128, 256, device=device)
    assert (layer.in_features, layer.out_features, layer.block_shape) == (128, 256, (32, 32))
    assert layer.pattern.nnz == 16 and layer.density == 0.5 and layer.bias.shape == (256,)
    assert layer.values.shape == (16, 32, 32) and layer.values.dtype == torch.float32
    assert torch.equal(layer.block_coords.cpu(), layer.pattern.block_coords)


def test_positional_arguments_of_2020(capsys):
    linear = nn.Linear(64, 96)
    layer = BlockSparseLinear(0, 0, False, 0.5, linear, True, (16, 16))
    assert (layer.in_features, layer.out_features, layer.block_shape) == (64, 96, (16, 16))
    assert "BlockSparseLinear" in capsys.readouterr().out


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_torch_nn_linear_keeps_the_strongest_blocks_exactly(bias, device):
    linear = nn.Linear(64, 96, bias=bias, device=device)
    layer = BlockSparseLinear(0, 0, False, torch_nn_linear=linear, density=0.5, block_shape=(16, 16))
    norms = linear.weight.detach().view(6, 16, 4, 16).square().sum((1, 3)).cpu()
    kept = layer.pattern.mask()
    assert layer.pattern.nnz == 12 and norms[kept].min() >= norms[~kept].max()
    expected = linear.weight * kept.repeat_interleave(16, 0).repeat_interleave(16, 1).to(device)
    assert torch.equal(layer.weight.to_dense(), expected)
    assert (layer.bias is None) == (not bias)
    assert not bias or torch.equal(layer.bias, linear.bias)


@pytest.mark.parametrize("shape", [(14, 9), (64, 32)], ids=["edges", "fitting"])
@each_dtype
def test_from_linear_to_linear_is_exact(shape, dtype, device):
    linear = nn.Linear(shape[1], shape[0], device=device, dtype=dtype)
    layer = BlockSparseLinear.from_linear(linear, block_shape=(4, 4))
    assert layer.density == 1 and layer.values.dtype == dtype
    again = layer.to_linear()
    assert torch.equal(again.weight, linear.weight) and torch.equal(again.bias, linear.bias)
    assert again.weight.data_ptr() != linear.weight.data_ptr()


def test_from_linear_without_density_drops_only_zero_blocks(device):
    linear = nn.Linear(8, 12, device=device)
    linear.weight.data[4:8, :4] = 0
    layer = BlockSparseLinear.from_linear(linear, block_shape=(4, 4))
    assert layer.pattern.nnz == 5 and torch.equal(layer.to_linear().weight, linear.weight)


def test_from_linear_with_importance(device):
    scores = torch.tensor([[0.0, 3.0], [1.0, 2.0]])
    layer = BlockSparseLinear.from_linear(
        nn.Linear(8, 8, device=device), density=0.5, block_shape=(4, 4), importance=scores
    )
    assert layer.block_coords.tolist() == [[0, 1], [1, 1]]


def test_from_linear_keeps_mode_and_frozen_parameters(device):
    linear = nn.Linear(8, 8, device=device).eval()
    linear.weight.requires_grad_(False)
    layer = BlockSparseLinear.from_linear(linear, density=0.5, block_shape=(4, 4))
    assert not layer.training and not layer.values.requires_grad and layer.bias.requires_grad
    again = layer.to_linear()
    assert not again.training and not again.weight.requires_grad and again.bias.requires_grad


def test_from_linear_leaves_the_linear_alone(device):
    linear = nn.Linear(8, 8, device=device)
    before = linear.weight.clone()
    layer = BlockSparseLinear.from_linear(linear, block_shape=(4, 4))
    layer.values.data.zero_()
    layer.bias.data.zero_()
    assert torch.equal(linear.weight, before) and linear.bias.any()


@each_dtype
def test_device_and_dtype_arguments(dtype, device):
    layer = BlockSparseLinear(64, 64, device=device, dtype=dtype)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {device.type}
    assert layer.block_coords.dtype == torch.int32
    assert layer(torch.randn(2, 64, device=device).to(dtype)).dtype == dtype


def test_initial_values_follow_the_fan_in_that_the_pattern_leaves(device):
    """Block row 0 stores one block, row 1 three (48 inputs), row 2 none."""
    mask = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
    layer = BlockSparseLinear(40, 48, pattern=mask, block_shape=(16, 16), device=device)
    rows = layer.block_coords[:, 0].cpu()
    for row, fan_in in ((0, 16), (1, 40)):
        bound = fan_in**-0.5
        dense = layer.weight.to_dense()[16 * row : 16 * row + 16]
        assert 0.9 * bound < dense.abs().max() <= bound
        assert 0.5 * bound < layer.bias[16 * row : 16 * row + 16].abs().max() <= bound
        assert abs(layer.values[rows == row].mean()) < 0.1 * bound
    assert not layer.bias[32:].any()
    assert not layer.values.detach().cpu()[past_edges(layer.pattern)].any()


def test_full_density_draws_from_the_distribution_of_nn_linear(device):
    layer, linear = BlockSparseLinear(256, 256, density=1.0, device=device), nn.Linear(256, 256, device=device)
    assert layer.values.std().item() == pytest.approx(linear.weight.std().item(), rel=0.02)
    assert layer.bias.abs().max().item() == pytest.approx(linear.bias.abs().max().item(), rel=0.1)


def test_reset_parameters_draws_again(device):
    layer = make_layer(device)
    before = layer.values.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.values, before)
    assert not layer.values.detach().cpu()[past_edges(layer.pattern)].any()


def test_construction_follows_the_seed(device):
    def draw(seed: int) -> BlockSparseLinear:
        torch.manual_seed(seed)
        return BlockSparseLinear(128, 128, block_shape=(16, 16), device=device)

    first, second, other = draw(3), draw(3), draw(4)
    assert first.pattern == second.pattern and torch.equal(first.values, second.values)
    assert first.pattern != other.pattern


def test_pattern_with_the_density_and_block_shape_that_it_has(device):
    mask = torch.tensor([[True, False], [True, True]])
    layer = BlockSparseLinear(8, 8, pattern=mask, density=0.75, block_shape=(4, 4), device=device)
    assert layer.pattern.nnz == 3


# Reading


def test_repr():
    layer = BlockSparseLinear(128, 256, bias=False, density=0.25, activation="gelu")
    assert repr(layer) == (
        "BlockSparseLinear(in_features=128, out_features=256, bias=False, block_shape=(32, 32), nnz=8, density=0.25, "
        "activation=gelu)"
    )


def test_weight_reads_like_that_of_a_linear(device):
    layer = make_layer(device)
    weight = layer.weight
    assert isinstance(weight, BlockSparseMatrix) and weight.shape == (14, 9)
    assert (weight.dtype, weight.device, weight.requires_grad) == (torch.float64, layer.values.device, True)
    assert weight.data.data_ptr() == layer.values.data_ptr()
    assert torch.equal(weight.to_dense(), dense_weight(layer))
    layer.requires_grad_(False)
    assert not layer.weight.requires_grad


def test_parameters_and_buffers_are_the_documented_ones():
    layer = BlockSparseLinear(64, 64)
    assert [name for name, _ in layer.named_parameters()] == ["values", "bias"]
    assert [name for name, _ in layer.named_buffers()] == ["block_coords"]
    assert not isinstance(layer, nn.Linear)


# Moving and copying


@each_dtype
def test_to_dtype(dtype, device):
    layer = make_layer(device)
    expected = layer.values.detach().to(dtype)
    assert layer.to(dtype) is layer
    assert torch.equal(layer.values, expected) and layer.bias.dtype == dtype
    assert layer.block_coords.dtype == torch.int32
    assert layer(torch.randn(2, 9, device=device).to(dtype)).dtype == dtype


def test_half_and_double_keep_the_pattern(device):
    layer = make_layer(device)
    pattern = layer.pattern
    assert layer.half().values.dtype == torch.float16 and layer.pattern is pattern
    assert layer.double().values.dtype == torch.float64 and layer.pattern is pattern


def test_to_device(device):
    layer = make_layer(torch.device("cpu"))
    x = torch.randn(3, 9, dtype=torch.float64)
    before = layer(x)
    layer.to(device)
    torch.testing.assert_close(layer(x.to(device)).cpu(), before)


def test_deepcopy_shares_the_pattern_and_nothing_else(device):
    layer = make_layer(device)
    x = torch.randn(3, 9, dtype=torch.float64, device=device)
    before = layer(x)
    again = copy.deepcopy(layer)
    assert again.pattern is layer.pattern
    for name, tensor in layer.state_dict().items():
        assert again.state_dict()[name].data_ptr() != tensor.data_ptr()
    again.values.data.zero_()
    free = (~layer.pattern.mask()).nonzero()
    again.rewire([0], free[:1])
    assert torch.equal(layer(x), before) and again.pattern is not layer.pattern


@pytest.mark.parametrize("weights_only", [True, False], ids=["state-dict", "module"])
def test_torch_save(weights_only, device):
    layer = make_layer(device, activation="relu")
    file = io.BytesIO()
    torch.save(layer.state_dict() if weights_only else layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    if weights_only:
        again = make_layer(device, activation="relu")
        again.load_state_dict(loaded)
        loaded = again
    assert loaded.pattern == layer.pattern
    assert_same_function(loaded, layer)


def test_pickle(device):
    layer = make_layer(device, bias=False).eval()
    again = pickle.loads(pickle.dumps(layer))
    assert again.pattern == layer.pattern and not again.training and again.bias is None
    assert_same_function(again, layer)
    again.pattern.validate()


def test_pickle_of_a_large_pattern_holds_no_derived_index():
    layer = BlockSparseLinear(1600, 1600, block_shape=(4, 4), density=0.25)
    size = len(pickle.dumps(layer))
    values, coordinates = layer.values.numel() * 4, layer.block_coords.numel() * 4
    assert size < values + 2 * coordinates + 20_000  # the buffer's, and the pattern's own


# Autocast


def test_autocast_computes_in_its_dtype_and_keeps_gradient_dtypes(device):
    layer = make_layer(device, torch.float32)
    x = torch.randn(5, 9, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    expected = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    assert torch.equal(y, expected)
    y.float().square().sum().backward()
    for tensor in (x, layer.values, layer.bias):
        assert tensor.grad.dtype == torch.float32 and tensor.grad.any()


def test_autocast_takes_a_bfloat16_input(device):
    layer = make_layer(device, torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layer(torch.randn(5, 9, device=device).bfloat16()).dtype == torch.bfloat16


def test_autocast_off_inside_autocast(device):
    layer = make_layer(device, torch.float32)
    x = torch.randn(5, 9, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.autocast(device.type, enabled=False):
        assert torch.equal(layer(x), layer(x)) and layer(x).dtype == torch.float32


# Training

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_that_of_a_masked_dense_layer(optimizer, device):
    ours = nn.Sequential(
        make_layer(device), nn.Tanh(), BlockSparseLinear(14, 9, block_shape=(4, 4), device=device, dtype=torch.float64)
    )
    layers = [ours[0], ours[2]]
    masks = [(dense_weight(copy.deepcopy(layer).requires_grad_(False)) != 0).double() for layer in layers]
    weights = [dense_weight(layer).detach().clone().requires_grad_() for layer in layers]
    biases = [layer.bias.detach().clone().requires_grad_() for layer in layers]

    def dense_model(x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, weights[0] * masks[0], biases[0]).tanh()
        return functional.linear(hidden, weights[1] * masks[1], biases[1])

    steps = OPTIMIZERS[optimizer](ours.parameters()), OPTIMIZERS[optimizer]([*weights, *biases])
    x = torch.randn(20, 9, dtype=torch.float64, device=device)
    losses = []
    for _ in range(8):
        for model, step in zip((ours, dense_model), steps, strict=True):
            step.zero_grad()
            loss = functional.mse_loss(model(x), x.flip(0))
            loss.backward()
            step.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    for layer, weight, mask, bias in zip(layers, weights, masks, biases, strict=True):
        torch.testing.assert_close(layer.weight.to_dense(), weight * mask, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(layer.bias, bias, rtol=1e-9, atol=1e-11)
        assert not layer.values.detach().cpu()[past_edges(layer.pattern)].any()


# Rewiring


def free_places(layer: BlockSparseLinear) -> torch.Tensor:
    return (~layer.pattern.mask()).nonzero()


def test_rewire_moves_blocks_and_leaves_the_others_in_their_slots(device):
    layer = make_layer(device)
    before, coords, parameter = layer.values.detach().clone(), layer.block_coords.clone(), layer.values
    slots, places = torch.tensor([4, 1]), free_places(layer)[:2]
    layer.rewire(slots, places)
    assert layer.values is parameter and layer.values.data_ptr() == parameter.data_ptr()
    kept = [slot for slot in range(len(coords)) if slot not in (1, 4)]
    assert torch.equal(layer.values[kept], before[kept]) and torch.equal(layer.block_coords[kept], coords[kept])
    assert not layer.values[slots].any() and torch.equal(layer.block_coords[slots].cpu(), places.int())
    assert_same_function(layer, lambda x: functional.linear(x, dense_weight(layer), layer.bias))


def test_rewire_with_values_clears_what_lies_past_an_edge(device):
    layer = BlockSparseLinear(
        9, 14, pattern=torch.tensor([[True, False, False]] + [[False] * 3] * 3), block_shape=(4, 4), device=device
    )
    layer.rewire([0], [[3, 2]], values=torch.ones(1, 4, 4, device=device))
    expected = torch.zeros(4, 4)
    expected[:2, :1] = 1
    assert torch.equal(layer.values[0].cpu(), expected)
    assert layer.weight.to_dense().sum() == 2


def test_rewire_to_a_mask_moves_as_few_blocks_as_needed(device):
    layer = make_layer(device)
    mask, before, coords = layer.pattern.mask(), layer.values.detach().clone(), layer.block_coords.clone()
    old, new = mask.nonzero()[2], free_places(layer)[0]
    mask[tuple(old)], mask[tuple(new)] = False, True
    moved = layer.rewire_to(mask)
    slot = int((coords.cpu() == old).all(1).nonzero())
    assert moved.tolist() == [slot] and torch.equal(layer.pattern.mask(), mask)
    kept = torch.arange(len(coords)) != slot
    assert torch.equal(layer.values[kept], before[kept]) and not layer.values[slot].any()
    assert layer.rewire_to(mask).tolist() == []


def test_optimizer_state_stays_with_its_block(device):
    layer = make_layer(device)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(5, 9, dtype=torch.float64, device=device)).sum().backward()
    optimizer.step()
    average = optimizer.state[layer.values]["exp_avg"].clone()
    layer.rewire([0], free_places(layer)[:1])
    assert torch.equal(optimizer.state[layer.values]["exp_avg"], average)
    layer(torch.randn(5, 9, dtype=torch.float64, device=device)).sum().backward()
    optimizer.step()


def test_rewire_between_forward_and_backward_keeps_the_recorded_pattern(device):
    """The recorded graph multiplies with what the forward saw, or says that it cannot; it never mixes both."""
    layer = make_layer(device)
    x = torch.randn(5, 9, dtype=torch.float64, device=device, requires_grad=True)
    y = layer(x)
    layer.rewire([0], free_places(layer)[:1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("density", [1 / 12, 0.25, 0.75, 1.0])
def test_resize_to_keeps_the_parameter_and_the_kept_blocks(density, device):
    layer = make_layer(device)
    values, before, old = layer.values, layer.values.detach().clone(), layer.pattern
    mask = BlockPattern.random((14, 9), density, (4, 4)).mask()
    kept = layer.resize_to(mask)
    stays = mask[tuple(old.block_coords.long().unbind(1))]
    assert kept.tolist() == stays.nonzero()[:, 0].tolist()
    assert layer.values is values and torch.equal(layer.pattern.mask(), mask)
    assert torch.equal(layer.pattern.block_coords[: len(kept)], old.block_coords[kept.cpu()])
    assert torch.equal(values[: len(kept)], before[kept]) and not values[len(kept) :].any()
    x = torch.randn(5, 9, dtype=torch.float64, device=device)
    torch.testing.assert_close(layer(x), functional.linear(x, dense_weight(layer), layer.bias))


@pytest.mark.parametrize("x_needs_gradient", [True, False], ids=["both", "values-only"])
@pytest.mark.parametrize("resize", ["resize_to", "load_state_dict"])
def test_a_resized_layer_trains_on_while_an_old_graph_lives(resize, x_needs_gradient, device):
    """The last step's loss is usually alive in the next forward; an old graph must not write an old gradient."""
    layer = make_layer(device)
    x = torch.randn(5, 9, dtype=torch.float64, device=device, requires_grad=x_needs_gradient)
    old = layer(x).sum()
    if resize == "resize_to":
        layer.resize_to(torch.eye(4, 3) > 0)
    else:
        layer.load_state_dict(BlockSparseLinear(9, 14, pattern=torch.eye(4, 3) > 0, block_shape=(4, 4)).state_dict())
    layer(x).sum().backward()
    assert layer.values.grad.shape == (3, 4, 4)
    found = layer.values.grad.clone()
    with pytest.raises(RuntimeError):
        old.backward()
    assert torch.equal(layer.values.grad, found)


def test_resize_to_refuses_another_grid(device):
    layer = make_layer(device)
    state = copy.deepcopy(layer.state_dict())
    with pytest.raises(BlockSparseError, match=r"mask must be the block grid \(4, 3\)"):
        layer.resize_to(torch.ones(3, 4, dtype=torch.bool))
    assert all(torch.equal(entry, layer.state_dict()[name]) for name, entry in state.items())
