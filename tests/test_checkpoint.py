"""save_sparse and load_sparse: bitwise round trips, and refusals that name file and layer and change nothing."""

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pytorch_block_sparse import (
    BlockPattern,
    BlockSparseError,
    BlockSparseLinear,
    checkpoint_file,
    cli,
    load_sparse,
    save_sparse,
)
from pytorch_block_sparse.optional import MissingPackageError

safetensors_torch = pytest.importorskip("safetensors.torch")


class Net(nn.Module):
    """Layers of every kind that a checkpoint must carry; ``sparse`` decides about the three that may be either."""

    def __init__(self, sparse, dtype=torch.float32):
        super().__init__()

        def linear(in_features, out_features, density, block, **options):
            if not sparse:
                return nn.Linear(in_features, out_features, bias=options.get("bias", True), dtype=dtype)
            layer = BlockSparseLinear(
                in_features, out_features, density=density, block_shape=block, dtype=dtype, **options
            )
            if not layer.values.is_meta:  # slots out of row order: a round trip must keep them
                order = torch.randperm(layer.pattern.nnz)
                layer.rewire(order, layer.block_coords.clone(), layer.values.detach()[order])
            return layer

        self.embed = nn.Embedding(11, 24, dtype=dtype)
        self.first = linear(24, 40, 0.5, (16, 16))  # with edge blocks
        self.body = nn.Sequential(linear(40, 24, 0.4, (8, 4), bias=False), nn.BatchNorm1d(24, dtype=dtype))
        self.plain = nn.Linear(24, 24, dtype=dtype)
        self.last = linear(24, 24, 1.0, (8, 8), activation="relu" if sparse else None)
        self.head = nn.Linear(24, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5, dtype=dtype))
        self.register_buffer("hidden", torch.arange(24.0).to(dtype), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.hidden * self.scale
        return self.head(self.last(self.plain(self.body(self.first(x)))))


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": 1}


TOKENS = torch.arange(11)


def contents(model):
    """Everything that a model holds, copied: names, data, and which parameters are one."""
    state = model.state_dict(keep_vars=True)
    places = {}
    return (
        {name: (type(tensor), tensor.detach().clone()) for name, tensor in state.items()},
        [places.setdefault(id(tensor), name) for name, tensor in state.items()],
        [(path, repr(module), module.training) for path, module in model.named_modules()],
    )


def assert_same(first, second):
    assert first[1:] == second[1:]
    assert first[0].keys() == second[0].keys()
    for name, (kind, tensor) in first[0].items():
        assert kind is second[0][name][0], name
        assert tensor.dtype == second[0][name][1].dtype and torch.equal(tensor, second[0][name][1]), name


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    net = Net(sparse=True)
    net(TOKENS)  # batch statistics
    net.plain.weight.requires_grad_(False)
    return net.eval()


@pytest.fixture
def saved(model, tmp_path):
    save_sparse(model, tmp_path / "saved")
    return tmp_path / "saved"


def dense_net():
    torch.manual_seed(2)
    net = Net(sparse=False)
    net.plain.weight.requires_grad_(False)
    return net.eval()


# Round trips


def test_a_directory_holds_a_description_and_one_tensor_file(saved):
    description = json.loads((saved / "block_sparse.json").read_text())
    assert sorted(path.name for path in saved.iterdir()) == sorted(["block_sparse.json", description["tensors"]])
    assert (description["format"], description["version"]) == ("pytorch_block_sparse", 1)
    assert description["aliases"] == {"head.weight": "embed.weight"} and description["non_persistent"] == ["hidden"]
    assert description["layers"][1] == {
        "path": "body.0",
        "shape": [24, 40],
        "block_shape": [8, 4],
        "nnz": 12,
        "bias": False,
        "activation": None,
        "dtype": "float32",
    }
    tensors = safetensors_torch.load_file(saved / description["tensors"])
    assert "head.weight" not in tensors, "tied tensors are stored once"


@pytest.mark.parametrize("alone", [False, True], ids=["directory", "file"])
def test_dense_model_becomes_the_saved_one(model, saved, alone):
    other = dense_net()
    path = next(saved.glob("*.safetensors")) if alone else saved
    embedding = other.embed.weight
    assert load_sparse(path, other) is other
    assert_same(contents(model), contents(other))
    assert other.first.pattern == model.first.pattern and other.last.activation == "relu"
    assert other.embed.weight is embedding and other.head.weight is embedding, "loaded in place"
    assert not other.plain.weight.requires_grad and other.first.values.requires_grad and not other.first.training
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_sparse_model_takes_other_patterns_in_place(model, saved):
    torch.manual_seed(3)
    other = Net(sparse=True).eval()
    other.first = BlockSparseLinear(24, 40, density=0.2, block_shape=(16, 16)).eval()  # another nnz
    other.last = BlockSparseLinear(24, 24, block_shape=(4, 4)).eval()  # another block: replaced
    other.plain.weight.requires_grad_(False)
    values, layer = other.first.values, other.first
    load_sparse(saved, other)
    assert other.first is layer and other.first.values is values and values.shape[0] == model.first.values.shape[0]
    assert_same(contents(model), contents(other))
    assert torch.equal(other(TOKENS), model(TOKENS))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_meta_model_is_filled(model, saved, sparse):
    with torch.device("meta"):
        other = Net(sparse).eval()
    other.plain.weight.requires_grad_(False)
    load_sparse(saved, other)
    assert not any(tensor.is_meta for tensor in (*other.parameters(), *other.buffers()))
    assert_same(contents(model), contents(other))
    assert other.head.weight is other.embed.weight, "ties of the model survive"
    assert torch.equal(other.hidden, model.hidden), "a buffer outside the state dict"
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_tensors_go_where_the_model_is(model, saved, device):
    other = load_sparse(saved, dense_net().to(device))
    assert {tensor.device.type for tensor in (*other.parameters(), *other.buffers())} == {device.type}
    torch.testing.assert_close(other(TOKENS.to(device)).cpu(), model(TOKENS))
    with torch.device("meta"):
        other = Net(sparse=False).eval()
    load_sparse(saved, other, device=device)
    assert {tensor.device.type for tensor in (*other.parameters(), *other.buffers())} == {device.type}
    assert other.first.pattern == model.first.pattern
    assert {tensor.device.type for tensor in load_sparse(saved, device=device).values()} == {device.type}
    save_sparse(other, saved)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in load_sparse(saved).items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_is_bitwise(dtype, tmp_path):
    model = Net(True, dtype).eval()
    save_sparse(model, tmp_path)
    other = load_sparse(tmp_path, Net(False, dtype).eval())
    assert_same(contents(model), contents(other))


def test_data_takes_the_models_dtype_and_meta_takes_the_files(model, tmp_path):
    save_sparse(copy.deepcopy(model).bfloat16(), tmp_path)
    other = load_sparse(tmp_path, dense_net())
    assert other.first.values.dtype == other.plain.weight.dtype == torch.float32
    assert torch.equal(other.first.values, model.first.values.bfloat16().float())
    for sparse in (False, True):
        with torch.device("meta"):
            other = Net(sparse)
        load_sparse(tmp_path, other)
        assert other.first.values.dtype == other.plain.weight.dtype == torch.bfloat16


def test_a_layer_of_another_activation_is_replaced(model, saved):
    other = Net(sparse=True).eval()
    other.last = BlockSparseLinear(24, 24, block_shape=(8, 8), density=1.0, activation="gelu").eval()
    load_sparse(saved, other)
    assert other.last.activation == "relu" and torch.equal(other(TOKENS), model(TOKENS))


def test_what_is_frozen_stays_frozen(saved):
    other = dense_net()
    other.first.weight.requires_grad_(False)
    other.last.bias.requires_grad_(False)
    load_sparse(saved, other)
    trained = [layer.values.requires_grad for layer in (other.first, other.last)]
    assert trained == [False, True] and (other.first.bias.requires_grad, other.last.bias.requires_grad) == (True, False)


def test_without_a_model_a_state_dict_comes_back(model, saved):
    state = load_sparse(saved)
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert state["head.weight"] is state["embed.weight"]
    torch.manual_seed(5)
    other = Net(sparse=True)
    other.load_state_dict(state)
    assert torch.equal(other.eval()(TOKENS), model(TOKENS))


def test_a_layer_by_itself(tmp_path):
    layer = BlockSparseLinear(20, 12, block_shape=(4, 4))
    save_sparse(layer, tmp_path)
    other = load_sparse(tmp_path, BlockSparseLinear(20, 12, block_shape=(4, 4), density=1.0))
    assert torch.equal(other.weight.to_dense(), layer.weight.to_dense()) and torch.equal(other.bias, layer.bias)
    with pytest.raises(BlockSparseError, match="the model itself is a Linear"):
        load_sparse(tmp_path, nn.Linear(20, 12))


def test_a_pattern_without_blocks(tmp_path):
    pattern = BlockPattern.from_mask(torch.zeros(2, 3, dtype=torch.bool), (4, 4))
    model = nn.ModuleList([BlockSparseLinear(12, 8, pattern=pattern), BlockSparseLinear(12, 8, pattern=pattern)])
    save_sparse(model, tmp_path)
    other = load_sparse(tmp_path, nn.ModuleList([nn.Linear(12, 8), nn.Linear(12, 8)]))
    assert [layer.pattern.nnz for layer in other] == [0, 0] and torch.equal(other[1].bias, model[1].bias)
    assert other[0].values is not other[1].values


def test_shared_modules_and_tied_values_stay_so(tmp_path):
    layer = BlockSparseLinear(16, 16, block_shape=(8, 8), density=0.75)
    tied = BlockSparseLinear(16, 16, pattern=layer.pattern)
    tied.values = layer.values
    model = nn.Sequential(layer, nn.ReLU(), layer, tied)
    save_sparse(model, tmp_path)
    assert len(safetensors_torch.load_file(next(tmp_path.glob("*.safetensors")))) == 5
    shared = nn.Linear(16, 16)
    other = load_sparse(tmp_path, nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(16, 16)))
    assert other[0] is other[2] and other[3].values is other[0].values and other[3].bias is not other[0].bias
    assert_same(contents(model), contents(other))
    # Separate modules share what was one parameter.
    other = load_sparse(tmp_path, nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 16)))
    assert other[0] is not other[2] and other[0].values is other[2].values


def test_views_of_one_memory_are_stored_apart(tmp_path):
    memory = torch.arange(12.0)
    model = nn.Module()
    model.register_buffer("first", memory[:8])
    model.register_buffer("second", memory[4:])
    model.register_buffer("turned", memory.view(3, 4).t())
    save_sparse(model, tmp_path)
    state = load_sparse(tmp_path)
    assert all(torch.equal(state[name], getattr(model, name)) for name in ("first", "second", "turned"))
    assert next(tmp_path.glob("*.safetensors")).stat().st_size < 1000


def test_the_loaded_model_trains_on(saved):
    other = load_sparse(saved, dense_net()).train()
    before = other.first.values.detach().clone()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    other(TOKENS).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, other.first.values)


def test_loading_leaves_the_random_generators_alone(saved):
    other, before = dense_net(), torch.get_rng_state()
    load_sparse(saved, other)
    assert torch.equal(before, torch.get_rng_state())


def test_no_pickle_is_read_or_written(model, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickle")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    save_sparse(model, tmp_path)
    load_sparse(tmp_path, dense_net())


# Writing


def test_saving_again_replaces_the_model(model, saved):
    other = Net(sparse=True).eval()
    save_sparse(other, saved)
    assert len(list(saved.iterdir())) == 2
    assert_same(contents(other), contents(load_sparse(saved, Net(sparse=False).eval())))


@pytest.mark.parametrize("write", [1, 2], ids=["tensors", "description"])
def test_an_interrupted_save_leaves_the_old_model(model, saved, write, monkeypatch):
    replace, calls = os.replace, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == write:
            raise OSError("power failure")
        replace(*arguments)

    monkeypatch.setattr(checkpoint_file.os, "replace", interrupted)
    with pytest.raises(OSError, match="power failure"):
        save_sparse(Net(sparse=True), saved)
    monkeypatch.undo()
    assert not list(saved.glob(".*")), "no temporary file is left"
    assert_same(contents(model), contents(load_sparse(saved, dense_net())))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda net: net.embed.to("meta"), "embed.weight must hold data to be saved, got a meta tensor"),
        (
            lambda net: net.register_buffer("odd", torch.eye(3).to_sparse()),
            "odd must be a plain strided tensor to be saved, got Tensor",
        ),
        (
            lambda net: setattr(net, "plain", WithExtraState(24, 24)),
            "plain._extra_state must be a tensor to be saved, got dict",
        ),
    ],
    ids=["meta", "sparse", "extra-state"],
)
def test_what_cannot_be_saved_is_named(edit, message, tmp_path):
    net = Net(sparse=True)
    edit(net)
    with pytest.raises(BlockSparseError, match=message):
        save_sparse(net, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_is_no_directory(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BlockSparseError, match="directory must be a directory, got the file"):
        save_sparse(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_without_safetensors_the_extra_is_named(model, saved, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: save_sparse(model, tmp_path / "new"), lambda: load_sparse(saved)):
        with pytest.raises(MissingPackageError, match=r"pip install 'pytorch_block_sparse\[save\]'"):
            call()


# Damaged files


def tampered(saved, tensors=None, **fields):
    """The saved model with changed fields of the description, or ``tensors(state)`` changed, in both places."""
    description = json.loads((saved / "block_sparse.json").read_text())
    path = saved / description["tensors"]
    state = safetensors_torch.load_file(path)
    for name, edit in fields.items():
        description[name] = edit(description[name])
    if tensors is not None:
        tensors(state)
    text = json.dumps(description)
    safetensors_torch.save_file(state, path, metadata={"format": "pt", "pytorch_block_sparse": text})
    (saved / "block_sparse.json").write_text(text)
    return saved


def edit_tensor(name, edit):
    def change(state):
        tensor = edit(state.pop(name))
        if tensor is not None:
            state[name] = tensor

    return change


def edit_layer(index, **fields):
    def change(layers):
        layers[index].update(fields)
        return layers

    return change


def put(position, value):
    def edit(tensor):
        tensor[position] = value
        return tensor

    return edit


DAMAGES = {
    "row-out-of-range": (
        {"tensors": edit_tensor("first.block_coords", put((0, 0), 3))},
        r"safetensors: layer 'first': block_coords: every block row must be from 0 to 2, got \d to 3",
    ),
    "negative-column": (
        {"tensors": edit_tensor("body.0.block_coords", put((2, 1), -1))},
        r"layer 'body.0': block_coords: every block column must be from 0 to 9, got -1 to",
    ),
    "duplicate": (
        {"tensors": edit_tensor("last.block_coords", lambda coords: torch.zeros_like(coords))},
        r"layer 'last': block_coords must not hold a block twice, got \(0, 0\) again",
    ),
    "float-coordinates": (
        {"tensors": edit_tensor("last.block_coords", lambda coords: coords.float())},
        r"layer 'last': block_coords must be int32, got F32",
    ),
    "fewer-values": (
        {"tensors": edit_tensor("last.values", lambda values: values[:-1].clone())},
        r"layer 'last': values must be \(9, 8, 8\) as recorded, got \(8, 8, 8\)",
    ),
    "other-dtype": (
        {"tensors": edit_tensor("last.values", lambda values: values.double())},
        r"layer 'last': values must be float32, got F64",
    ),
    "no-values": ({"tensors": edit_tensor("last.values", lambda _: None)}, r"layer 'last': values is missing"),
    "no-bias": ({"tensors": edit_tensor("last.bias", lambda _: None)}, r"layer 'last': bias is missing"),
    "no-dense-tensor": (
        {"tensors": edit_tensor("plain.weight", lambda _: None)},
        r"safetensors: missing in the file: plain.weight",
    ),
    "one-tensor-more": (
        {"tensors": lambda state: state.update({"stranger": torch.ones(2)})},
        r"in the file, but not in the model: stranger",
    ),
    "other-shape": (
        {"tensors": edit_tensor("plain.weight", lambda weight: weight[:5].clone())},
        r"plain.weight is \(5, 24\) in the file, \(24, 24\) in the model",
    ),
    "integers": (
        {"tensors": edit_tensor("plain.bias", lambda bias: bias.long())},
        r"plain.bias is torch.int64 in the file, torch.float32 in the model",
    ),
    "version": ({"version": lambda _: 2}, r"block_sparse.json: version must be 1, got 2"),
    "format": ({"format": lambda _: "other"}, r"not a model saved by save_sparse"),
    "layer-twice": ({"layers": lambda layers: [*layers, layers[0]]}, r"layer 'first' stands twice"),
    "layers-no-list": ({"layers": lambda _: {}}, r"layers must be a list, got dict"),
    "unknown-field": ({"layers": edit_layer(0, mystery=1)}, r"a layer must be an object with the fields path, shape"),
    "nnz-too-large": ({"layers": edit_layer(0, nnz=7)}, r"layer 'first': nnz must be an integer from 0 to 6, got 7"),
    "nnz-other": ({"layers": edit_layer(0, nnz=2)}, r"layer 'first': values must be \(2, 16, 16\) as recorded"),
    "block-zero": ({"layers": edit_layer(0, block_shape=[0, 16])}, r"layer 'first': block_shape\[0\] must be"),
    "shape-other": ({"layers": edit_layer(0, shape=[48, 24])}, r"layer 'first': bias must be \(48,\) as recorded"),
    "shape-unequal-model": (
        {"layers": edit_layer(1, shape=[32, 40])},
        r"layer 'body.0': saved with \(out_features, in_features\) = \(32, 40\), the model has \(24, 40\)",
    ),
    "bias-hidden": ({"layers": edit_layer(0, bias=False)}, r"layer 'first': bias is stored"),
    "bias-no-bool": ({"layers": edit_layer(0, bias="yes")}, r"layer 'first': bias must be true or false, got 'yes'"),
    "activation": ({"layers": edit_layer(0, activation="tanh")}, r"layer 'first': activation must be None or one of"),
    "dtype": ({"layers": edit_layer(0, dtype="int8")}, r"layer 'first': dtype must be one of"),
    "path-unknown": (
        {
            "layers": edit_layer(0, path="elsewhere"),
            "tensors": lambda state: state.update(
                {f"elsewhere.{name}": state.pop(f"first.{name}") for name in ("values", "block_coords", "bias")}
            ),
        },
        r"layer 'elsewhere': the model has no such module",
    ),
    "alias-to-nothing": ({"aliases": lambda _: {"head.weight": "nothing"}}, r"alias 'head.weight' of 'nothing'"),
    "buffer-missing": ({"non_persistent": lambda _: ["hidden", "gone"]}, r"the buffer 'gone' is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_damage_is_named_and_changes_nothing(damage, sparse, saved):
    changes, message = DAMAGES[damage]
    fields = dict(changes)
    tensors = fields.pop("tensors", None)
    tampered(saved, tensors, **fields)
    other = Net(sparse)
    before = contents(other)
    with pytest.raises(BlockSparseError, match=message) as error:
        load_sparse(saved, other)
    assert str(saved) in str(error.value), "the file is named"
    assert_same(before, contents(other))


@pytest.mark.parametrize("keep", [0, 4, 100, 1000, -1])
def test_a_truncated_file_is_refused(saved, keep):
    path = next(saved.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:keep])
    other = dense_net()
    before = contents(other)
    with pytest.raises(BlockSparseError, match=r"safetensors: truncated, or no safetensors file"):
        load_sparse(saved, other)
    assert_same(before, contents(other))


def test_random_damage_is_refused_or_harmless(saved):
    """Bytes changed anywhere in the file: the package's own error and an untouched model, or a valid load."""
    path = next(saved.glob("*.safetensors"))
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    chance = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 2, 5))):
            place = chance.randrange(header if chance.random() < 0.7 else len(data))
            damaged[place] = (
                ord(chance.choice('0123456789"{}[],:a')) if chance.random() < 0.7 else chance.randrange(256)
            )
        path.write_bytes(damaged)
        other = Net(sparse=False)
        before = contents(other)
        try:
            load_sparse(path, other)
        except BlockSparseError as error:
            assert str(path) in str(error)
            assert_same(before, contents(other))
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"format": "pytorch_block_sparse"}', "[" * 100000])
def test_a_damaged_description_is_refused(saved, text):
    (saved / "block_sparse.json").write_text(text)
    with pytest.raises(BlockSparseError, match=r"block_sparse.json: (not JSON|not a model|version must be 1)"):
        load_sparse(saved)


def test_the_description_and_the_file_must_agree(saved):
    path = saved / "block_sparse.json"
    path.write_text(path.read_text().replace('"relu"', '"gelu"'))
    with pytest.raises(BlockSparseError, match="contradicts the header of block_sparse-"):
        load_sparse(saved)


@pytest.mark.parametrize("name", ["../block_sparse-1.safetensors", "block_sparse-/../../x.safetensors", "other", 3])
def test_the_description_cannot_lead_elsewhere(saved, name):
    path = saved / "block_sparse.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tensors": name}))
    with pytest.raises(BlockSparseError, match=r"block_sparse.json: tensors must be block_sparse-\*.safetensors, got"):
        load_sparse(saved)


def test_other_directories_and_files_are_refused(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BlockSparseError, match=r"holds no model saved by save_sparse: there is no block_sparse.json"):
        load_sparse(tmp_path / "empty")
    with pytest.raises(BlockSparseError, match="missing: there is no such file"):
        load_sparse(tmp_path / "missing")
    safetensors_torch.save_file({"weight": torch.ones(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(BlockSparseError, match=r"foreign.safetensors was not written by save_sparse"):
        load_sparse(tmp_path / "foreign.safetensors")
    next(saved.glob("*.safetensors")).unlink()
    with pytest.raises(BlockSparseError, match="there is no such file"):
        load_sparse(saved)


# Models that do not fit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda net: setattr(net, "first", nn.Linear(24, 32)), r"layer 'first': saved with .* = \(40, 24\), the model"),
        (
            lambda net: setattr(net, "first", nn.Linear(24, 40, bias=False)),
            r"layer 'first': saved with a bias, the model's layer is without one",
        ),
        (
            lambda net: net.body.__setitem__(0, nn.Linear(40, 24)),
            r"layer 'body.0': saved without a bias, the model's layer is with one",
        ),
        (
            lambda net: setattr(net, "first", nn.ReLU()),
            r"layer 'first': the model must have nn.Linear, .* or BlockSparseLinear there, got ReLU",
        ),
        (
            lambda net: setattr(net, "plain", BlockSparseLinear(24, 24, block_shape=(8, 8))),
            r"missing in the file: plain.block_coords, plain.values",
        ),
        (lambda net: setattr(net, "last", net.plain), r"one module at 'last' and 'plain', the file has not"),
        (
            lambda net: setattr(net.plain, "weight", net.last.weight),
            None,
        ),
        (lambda net: setattr(net.plain, "bias", net.body[1].bias), r"the model ties .* and .*, which differ"),
        (lambda net: net.__delattr__("plain"), r"in the file, but not in the model: plain.bias, plain.weight"),
    ],
    ids=["shape", "bias", "no-bias", "kind", "sparse-there", "shared", "tied-to-replaced", "tied", "gone"],
)
def test_a_model_that_does_not_fit_is_not_changed(edit, message, model, saved):
    other = Net(sparse=False)
    edit(other)
    if message is None:  # a weight tied to a layer that is replaced becomes its own
        load_sparse(saved, other)
        assert torch.equal(other.plain.weight, model.plain.weight)
        return
    before = contents(other)
    with pytest.raises(BlockSparseError, match=message):
        load_sparse(saved, other)
    assert_same(before, contents(other))


def test_a_meta_buffer_that_nobody_has_is_named(saved):
    with torch.device("meta"):
        other = Net(sparse=False)
        other.register_buffer("cache", torch.ones(3), persistent=False)
    with pytest.raises(BlockSparseError, match="the buffer 'cache' of the model holds no data, nor does the file"):
        load_sparse(saved, other)
    assert other.plain.weight.is_meta


def test_model_must_be_a_module(saved):
    with pytest.raises(BlockSparseError, match=r"model must be a torch.nn.Module or None, got dict"):
        load_sparse(saved, {})


# The command line


def test_info_shows_what_a_directory_holds(saved, capsys):
    assert cli.main(["info", str(saved)]) == 0
    text = capsys.readouterr().out
    assert "3 block-sparse layers" in text and "body.0" in text and "8x4" in text and "relu" in text
    assert cli.main(["info", str(saved), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layers"][1]["nnz"] == 12 and facts["layers"][1]["density"] == pytest.approx(0.4)
    assert facts["layers"][1]["bytes"] == 12 * (8 * 4 * 4 + 8)
    assert facts["dense"]["tensors"] == 10  # embedding, norm (5), plain (2), scale, hidden


def test_info_refuses_what_is_no_saved_model(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "pytorch_block_sparse", "info", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "holds no model saved by" in done.stderr and "Traceback" not in done.stderr
