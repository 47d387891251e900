"""State dicts: our own, nn.Linear's, the 2020 package's, damaged ones, and coordinates that change under a layer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from cases import permuted
from torch import Tensor, nn

from pytorch_block_sparse import BlockPattern, BlockSparseError, BlockSparseLinear


def make_layer(nnz: int = 6, **kwargs) -> BlockSparseLinear:
    """9 -> 14 in blocks of 4 x 4 on a 4 x 3 grid, slots out of order."""
    pattern = permuted(BlockPattern.random((14, 9), block_shape=(4, 4), nnz=nnz))
    return BlockSparseLinear(9, 14, pattern=pattern, **kwargs)


def snapshot(layer: BlockSparseLinear) -> dict[str, Tensor]:
    return copy.deepcopy(layer.state_dict())


def assert_holds(layer: BlockSparseLinear, state: dict[str, Tensor]) -> None:
    """The layer holds exactly ``state``, and computes with it."""
    found = layer.state_dict()
    assert list(found) == list(state)
    for name, tensor in state.items():
        assert torch.equal(found[name].cpu(), tensor.cpu()), name
    assert torch.equal(layer.pattern.block_coords, state["block_coords"].cpu())
    layer.pattern.validate()
    x = torch.randn(5, layer.in_features).to(layer.values)
    dense = x.new_zeros(16, 12)
    for (row, col), block in zip(state["block_coords"].tolist(), state["values"].to(x), strict=True):
        dense[4 * row : 4 * row + 4, 4 * col : 4 * col + 4] = block
    bias = state["bias"].to(x) if "bias" in state else 0
    torch.testing.assert_close(layer(x), x @ dense[:14, :9].t() + bias)


# Our own


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_keys(bias):
    assert list(make_layer(bias=bias).state_dict()) == ["values", *(["bias"] if bias else []), "block_coords"]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("nnz", [6, 3, 12, 0], ids=lambda nnz: f"nnz{nnz}")
def test_round_trip_resizes_the_same_parameter(nnz, bias, device):
    source, target = make_layer(nnz, bias=bias, device=device), make_layer(6, bias=bias, device=device)
    values = target.values
    target(torch.randn(2, 9, device=device)).sum().backward()
    result = target.load_state_dict(source.state_dict(), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert target.values is values and (nnz == 6 or values.grad is None)
    assert_holds(target, snapshot(source))
    target(torch.randn(2, 9, device=device)).sum().backward()
    assert target.values.grad.shape == (nnz, 4, 4)


def test_loaded_tensors_are_not_shared():
    source, target = make_layer(), make_layer()
    target.load_state_dict(source.state_dict())
    before = snapshot(target)
    source.values.data.zero_()
    source.rewire([0], (~source.pattern.mask()).nonzero()[:1])
    assert_holds(target, before)


def test_optimizer_trains_a_resized_parameter():
    layer = make_layer(6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.load_state_dict(make_layer(3).state_dict())
    before = layer.values.detach().clone()
    layer(torch.randn(5, 9)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer.values, before)


def test_other_dtype_and_device_are_converted(device):
    source, target = make_layer(dtype=torch.float64), make_layer(3, device=device)
    target.load_state_dict(source.state_dict())
    assert target.values.dtype == torch.float32 and target.values.device.type == device.type
    assert_holds(
        target, {name: tensor.to(target.state_dict()[name].dtype) for name, tensor in snapshot(source).items()}
    )


@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
def test_nested_model_with_prefix(assign, device):
    def model() -> nn.Module:
        inner = nn.Sequential(make_layer(device=device), nn.ReLU(), nn.Linear(14, 9, device=device))
        return nn.ModuleDict({"block": inner, "head": make_layer(3, device=device)})

    source, target = model(), model()
    target.load_state_dict(source.state_dict(), assign=assign)
    assert_holds(target["block"][0], snapshot(source["block"][0]))
    assert_holds(target["head"], snapshot(source["head"]))


def test_assign_takes_the_tensors_themselves():
    source, target = make_layer(3, dtype=torch.float64), make_layer(6)
    state = snapshot(source)
    target.load_state_dict(state, assign=True)
    assert target.values.dtype == torch.float64 and target.values.data_ptr() == state["values"].data_ptr()
    assert_holds(target, state)


def test_not_strict_without_bias():
    source, target = make_layer(), make_layer()
    state, bias = snapshot(source), target.bias.detach().clone()
    del state["bias"]
    assert target.load_state_dict(state, strict=False).missing_keys == ["bias"]
    assert_holds(target, {"values": state["values"], "bias": bias, "block_coords": state["block_coords"]})


def test_strict_reports_missing_and_unexpected_keys():
    state = snapshot(make_layer())
    state["other"] = state.pop("bias")
    with pytest.raises(RuntimeError, match=r'(?s)"bias".*"other"|"other".*"bias"'):
        make_layer().load_state_dict(state)


# nn.Linear


def test_linear_state_dict_is_gathered_at_the_layers_places(device):
    linear, layer = nn.Linear(9, 14, device=device), make_layer(device=device)
    coords = layer.pattern.block_coords.clone()
    layer.load_state_dict(linear.state_dict(), strict=True)
    assert torch.equal(layer.pattern.block_coords, coords) and torch.equal(layer.bias, linear.bias)
    stored = layer.pattern.mask().repeat_interleave(4, 0).repeat_interleave(4, 1)[:14, :9].to(device)
    assert torch.equal(layer.weight.to_dense(), linear.weight * stored)


def test_linear_state_dict_inside_a_model():
    source = nn.Sequential(nn.Linear(9, 14), nn.Linear(14, 3))
    target = nn.Sequential(BlockSparseLinear(9, 14, density=1.0, block_shape=(4, 4)), nn.Linear(14, 3))
    target.load_state_dict(source.state_dict())
    x = torch.randn(4, 9)
    torch.testing.assert_close(target(x), source(x))


# huggingface/pytorch_block_sparse 0.1.x


def legacy_state(dense: Tensor, places: list[tuple[int, int]], side: int, bias: Tensor | None) -> dict[str, Tensor]:
    """What the 2020 package saved: slot s holds the block at ``places[s]``, transposed."""
    rows, cols = dense.shape[0] // side, dense.shape[1] // side
    blocks = [dense[side * row : side * row + side, side * col : side * col + side].t() for row, col in places]
    by_row = sorted((row, col, slot) for slot, (row, col) in enumerate(places))
    by_col = sorted((col, row, slot) for slot, (row, col) in enumerate(places))
    state = {
        "weight.data": torch.cat(blocks),
        "weight.cols_a": torch.tensor([(col, slot) for _, col, slot in by_row], dtype=torch.int32),
        "weight.row_start_ends_a": torch.tensor([sum(row < line for row, *_ in by_row) for line in range(rows + 1)]),
        "weight.rows_b": torch.tensor([(row, slot) for _, row, slot in by_col], dtype=torch.int32),
        "weight.col_start_ends_b": torch.tensor([sum(col < line for col, *_ in by_col) for line in range(cols + 1)]),
        "weight.blocks": torch.tensor(places, dtype=torch.int32).flatten(),
    }
    state["weight.row_start_ends_a"] = state["weight.row_start_ends_a"].int()
    state["weight.col_start_ends_b"] = state["weight.col_start_ends_b"].int()
    return state if bias is None else {**state, "bias": bias}


PLACES = [(2, 1), (0, 0), (2, 0), (3, 1), (0, 1)]  # block row 1 is empty


@pytest.mark.parametrize("side", [32, 16])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("density", [1.0, 0.5], ids=["other-nnz", "other-places"])
def test_legacy_state_dict(side, bias, density, device):
    dense, linear_bias = torch.randn(4 * side, 2 * side), torch.randn(4 * side) if bias else None
    model = nn.Sequential(
        BlockSparseLinear(2 * side, 4 * side, bias=bias, density=density, block_shape=(side, side), device=device)
    )
    state = legacy_state(dense, PLACES, side, linear_bias)
    result = model.load_state_dict({f"0.{name}": tensor for name, tensor in state.items()}, strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    expected = torch.zeros_like(dense)
    for row, col in PLACES:
        place = slice(side * row, side * row + side), slice(side * col, side * col + side)
        expected[place] = dense[place]
    assert torch.equal(model[0].weight.to_dense().cpu(), expected)
    assert not bias or torch.equal(model[0].bias.cpu(), linear_bias)
    x = torch.randn(3, 2 * side)
    torch.testing.assert_close(
        model(x.to(device)).cpu(), nn.functional.linear(x, expected, linear_bias), rtol=1e-4, atol=1e-4
    )


def _with(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[dict], dict]:
    return lambda state: {**state, name: edit(state[name].clone())}


def _set(position: tuple[int, ...], value: int) -> Callable[[Tensor], Tensor]:
    def edit(tensor: Tensor) -> Tensor:
        tensor[position] = value
        return tensor

    return edit


LEGACY_DAMAGE = {
    "column-out-of-range": (_with("weight.cols_a", _set((0, 0), 2)), "block column"),
    "negative-column": (_with("weight.cols_a", _set((0, 0), -1)), "block column"),
    "slot-twice": (_with("weight.cols_a", _set((0, 1), 0)), "cols_a"),
    "slot-out-of-range": (_with("weight.cols_a", _set((0, 1), 5)), "cols_a"),
    "block-twice": (_with("weight.cols_a", _set((0, 0), 1)), "twice"),
    "falling-offsets": (_with("weight.row_start_ends_a", _set((1,), 4)), "row_start_ends_a"),
    "offsets-past-the-end": (_with("weight.row_start_ends_a", _set((4,), 6)), "row_start_ends_a"),
    "too-few-offsets": (_with("weight.row_start_ends_a", lambda tensor: tensor[:-1]), "row_start_ends_a"),
    "too-little-data": (_with("weight.data", lambda tensor: tensor[:-1]), "weight.data"),
    "flat-columns": (_with("weight.cols_a", lambda tensor: tensor.flatten()), "cols_a"),
    "no-columns": (lambda state: {k: v for k, v in state.items() if k != "weight.cols_a"}, "cols_a"),
}


@pytest.mark.parametrize("damage", LEGACY_DAMAGE)
def test_damaged_legacy_state_dict_changes_nothing(damage):
    edit, message = LEGACY_DAMAGE[damage]
    layer = BlockSparseLinear(32, 64, block_shape=(16, 16))
    before = snapshot(layer)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(edit(legacy_state(torch.randn(64, 32), PLACES, 16, torch.randn(64))))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


# Damaged coordinates

DAMAGE = {
    "row-out-of-range": (_with("block_coords", _set((0, 0), 4)), "block row"),
    "column-out-of-range": (_with("block_coords", _set((0, 1), 3)), "block column"),
    "negative": (_with("block_coords", _set((2, 0), -1)), "block row"),
    "huge": (_with("block_coords", _set((2, 1), 2**31 - 1)), "block column"),
    "twice": (_with("block_coords", lambda coords: coords[torch.tensor([0, 1, 2, 3, 4, 4])]), "twice"),
    "flat": (_with("block_coords", lambda coords: coords.flatten()), "block_coords"),
    "three-columns": (_with("block_coords", lambda coords: torch.cat((coords, coords[:, :1]), 1)), "block_coords"),
    "floating-point": (_with("block_coords", lambda coords: coords + 0.5), "block_coords"),
    "fewer-than-values": (_with("block_coords", lambda coords: coords[:-1]), "values"),
    "other-block-shape": (_with("values", lambda values: values[:, :2]), "values"),
    "no-values": (lambda state: {"block_coords": state["block_coords"].flip(0), "bias": state["bias"]}, "values"),
    "other-bias": (_with("bias", lambda bias: bias[:-1]), "bias"),
}


@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_state_dict_changes_nothing(damage, assign, device):
    edit, message = DAMAGE[damage]
    layer, source = make_layer(device=device), make_layer(device=device)
    before, pattern = snapshot(layer), layer.pattern
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(edit(snapshot(source)), assign=assign)
    assert layer.pattern is pattern
    assert_holds(layer, before)


# Coordinates that change under the layer


def test_valid_write_to_the_buffer_is_the_new_pattern(device):
    layer, other = make_layer(device=device), make_layer(device=device)
    with torch.no_grad():
        layer.block_coords.copy_(other.block_coords)
    state = snapshot(layer)
    layer(torch.randn(1, 9, device=device))
    assert layer.pattern == other.pattern
    assert_holds(layer, state)


def test_replaced_buffer_is_the_new_pattern(device):
    layer, other = make_layer(device=device), make_layer(device=device)
    layer.block_coords = other.block_coords.clone()
    assert layer.pattern == other.pattern
    assert_holds(layer, snapshot(layer))


INVALID_WRITES = {
    "out-of-range": (lambda coords: coords.index_fill(0, coords.new_zeros(1).long(), 99), "block row"),
    "negative": (lambda coords: coords - 5, "block row"),
    "uninitialised": (lambda coords: torch.full_like(coords, -(2**31)), "block row"),
    "twice": (torch.zeros_like, "twice"),
}


@pytest.mark.parametrize("write", INVALID_WRITES)
def test_invalid_write_to_the_buffer_is_an_error_at_the_next_forward(write, device):
    edit, message = INVALID_WRITES[write]
    layer = make_layer(device=device)
    state = snapshot(layer)
    x = torch.randn(2, 9, device=device)
    layer.block_coords.copy_(edit(layer.block_coords))
    for _ in range(2):
        with pytest.raises(BlockSparseError, match=message):
            layer(x)
    layer.block_coords.copy_(state["block_coords"])
    assert_holds(layer, state)


def test_replaced_buffer_of_another_length_is_an_error(device):
    layer = make_layer(device=device)
    layer.block_coords = layer.block_coords[:-1].clone()
    with pytest.raises(BlockSparseError, match="block_coords"):
        layer(torch.randn(2, 9, device=device))


# The meta device


def make_on_meta(how: str) -> BlockSparseLinear:
    if how == "context":
        with torch.device("meta"):
            return make_layer()
    return make_layer(device="meta") if how == "argument" else make_layer().to("meta")


@pytest.mark.parametrize("how", ["context", "argument", "to"])
def test_meta_to_empty_and_load(how, device):
    layer, source = make_on_meta(how), make_layer(3)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    layer.to_empty(device=device)
    layer.load_state_dict(source.state_dict())
    assert_holds(layer, snapshot(source))


@pytest.mark.parametrize("how", ["context", "argument", "to"])
def test_meta_to_empty_without_a_load_keeps_a_valid_pattern(how, device):
    layer = make_on_meta(how)
    pattern = layer.pattern
    layer.to_empty(device=device)
    assert layer.pattern is pattern and torch.equal(layer.block_coords.cpu(), pattern.block_coords)
    layer.reset_parameters()
    assert_holds(layer, snapshot(layer))


@pytest.mark.parametrize("how", ["context", "argument", "to"])
def test_meta_load_by_assignment(how):
    layer, source = make_on_meta(how), make_layer(3)
    state = snapshot(source)
    layer.load_state_dict(state, assign=True)
    assert_holds(layer, state)


def test_forward_on_meta():
    layer = make_on_meta("argument")
    y = layer(torch.randn(2, 3, 9, device="meta"))
    assert y.is_meta and y.shape == (2, 3, 14)


def test_to_empty_of_a_layer_with_data_keeps_its_pattern(device):
    layer = make_layer(device=device)
    pattern = layer.pattern
    layer.to_empty(device=device)
    layer.reset_parameters()
    assert layer.pattern is pattern
    assert_holds(layer, snapshot(layer))
