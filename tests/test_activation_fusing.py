"""sparsify(fuse_activation=True): what is fused, what is left alone and why, and the way back and to disk."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytorch_block_sparse import BlockSparseError, BlockSparseLinear, densify, load_sparse, save_sparse, sparsify
from pytorch_block_sparse.sparsify.activation_fusing import NOTHING_FOLLOWS

SETTINGS = {"block_shape": (8, 8)}


def mlp(activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), activation or nn.ReLU(), nn.Linear(32, 16))


@pytest.mark.parametrize(
    ("module", "activation"),
    [
        (nn.ReLU(), "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"),
    ],
    ids=str,
)
def test_the_neighbour_in_a_sequential_is_fused_and_restored(module, activation):
    model, x = mlp(module), torch.randn(5, 16)
    names = [name for name, _ in model.named_modules()]
    plain = sparsify(model, 0.5, inplace=False, **SETTINGS).model
    report = sparsify(model, 0.5, fuse_activation=True, **SETTINGS)
    assert [layer.activation for layer in report.layers] == [activation, None]
    assert report.not_fused == {"2": NOTHING_FOLLOWS} and f"computes its activation: 0 ({activation})" in str(report)
    assert type(model[1]) is nn.Identity and [name for name, _ in model.named_modules()] == names
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            torch.testing.assert_close(model(x), plain(x))
    twin = densify(copy.deepcopy(model))
    torch.testing.assert_close(twin(x), plain(x))
    assert densify(model)[1] is module and type(twin[1]) is type(module) and twin[1] is not module


def test_calibration_sees_the_activation():
    model = mlp(nn.GELU())
    batches = [torch.randn(64, 16) for _ in range(4)]
    options = {**SETTINGS, "calibration": batches, "importance": "obs", "inplace": False}
    plain = sparsify(model, 0.5, **options)
    fused = sparsify(model, 0.5, fuse_activation=True, **options)
    for one, other in zip(plain.layers, fused.layers, strict=True):
        assert one.pattern == other.pattern and one.output_error == pytest.approx(other.output_error, rel=1e-4)
    torch.testing.assert_close(fused.model(batches[0]), plain.model(batches[0]), rtol=1e-4, atol=1e-4)


def test_a_dry_run_and_a_failure_leave_the_activation():
    model = mlp()
    activation = model[1]
    assert sparsify(model, 0.5, fuse_activation=True, dry_run=True, **SETTINGS).layers[0].activation == "relu"
    with pytest.raises(BlockSparseError, match="loss"):
        sparsify(model, 0.5, fuse_activation=True, importance="taylor", calibration=[torch.randn(4, 16)], **SETTINGS)
    assert model[1] is activation and type(model[0]) is nn.Linear


def test_a_rule_that_names_the_activation_holds():
    model = mlp()
    report = sparsify(model, 0.5, rules={"0": {"activation": None}}, fuse_activation=True, **SETTINGS)
    assert model[0].activation is None and type(model[1]) is nn.ReLU and "rule" in report.not_fused["0"]
    model = mlp()
    sparsify(model, 0.5, rules={"0": {"activation": "gelu"}}, fuse_activation=True, **SETTINGS)
    assert model[0].activation == "gelu" and type(model[1]) is nn.ReLU
    with pytest.raises(BlockSparseError, match="0 has 'gelu'"):
        densify(model)


# Where the parent's own forward decides


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act, self.other, self.norm = nn.SiLU(), nn.ReLU(), nn.LayerNorm(32)


class Nested(Parent):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Rebound(Parent):
    def forward(self, x, scale=None):
        x = self.up(x)
        x = self.act(x)
        if scale is not None:
            x = x * scale
        return self.down(x)


class Named(Parent):
    def forward(self, x):
        hidden = self.up(x)
        active = self.act(hidden)
        return self.down(active)


class Returned(Parent):
    def forward(self, x):
        x = self.up(x)
        return self.down(self.act(x))


class InABranch(Parent):
    def forward(self, x):
        if self.training:
            x = self.up(x)
            x = self.act(x)
        return x


@pytest.mark.parametrize(
    ("parent", "layer"), [(Nested, "gate"), (Rebound, "up"), (Named, "up"), (Returned, "up"), (InABranch, "up")]
)
def test_plain_forms_are_fused(parent, layer):
    model, x = nn.Sequential(parent()), torch.randn(4, 16)
    plain = sparsify(model, 0.5, inplace=False, **SETTINGS).model
    report = sparsify(model, 0.5, fuse_activation=True, **SETTINGS)
    assert {each.name: each.activation for each in report.layers if each.activation} == {f"0.{layer}": "silu"}
    assert type(model[0].act) is nn.Identity
    for training in (True, False):
        torch.testing.assert_close(model.train(training)(x), plain.train(training)(x))


class UsedTwice(Parent):
    def forward(self, x):
        hidden = self.up(x)
        active = self.act(hidden)
        return self.down(active + hidden)


class OptionalUse(Parent):
    def forward(self, x, raw=False):
        hidden = self.up(x)
        active = self.act(hidden)
        return hidden if raw else self.down(active)


class TwoActivations(Parent):
    def forward(self, x):
        return self.down(self.act(self.up(x)) + self.act(self.gate(x)))


class CalledTwice(Parent):
    def forward(self, x):
        return self.down(self.act(self.up(x)) + self.up(x))


class NotNext(Parent):
    def forward(self, x):
        x = self.up(x)
        x = self.norm(x)
        x = self.act(x)
        return self.down(x)


class Late(Parent):
    def forward(self, x):
        hidden = self.up(x)
        gate = self.gate(x)
        return self.down(self.act(hidden) * gate)


class Either(Parent):
    def forward(self, x):
        hidden = self.up(x)
        if x.sum() > 0:
            hidden = self.gate(x)
        return self.down(self.act(hidden))


class Handed(Parent):
    def forward(self, x):
        return functional.relu(run(self, x))


def run(module, x):
    return module.down(module.act(module.up(x)))


class HandsItselfOn(Parent):
    def forward(self, x):
        x = self.up(x)
        x = self.act(x)
        return self.down(x) + run(self, x[..., :16])


class Helper(Parent):
    def raw(self, x):
        return self.up(x)

    def forward(self, x):
        return self.down(self.act(self.up(x)) + self.raw(x))


class Inherited(Rebound):
    def forward(self, x):
        h = self.act(self.up(x))
        return self.down(h) + super().forward(x)


class Deferred(Parent):
    def forward(self, x):
        y = self.act(self.up(x))
        return self.down(y) + (lambda: x)()


class ReadsTheWeight(Parent):
    def forward(self, x):
        return self.down(self.act(self.up(x.to(self.up.weight.dtype))))


class Function(Parent):
    def forward(self, x):
        return self.down(functional.silu(self.up(x)))


class Unknown(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Subclass(nn.SiLU):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("parent", "reason"),
    [
        (UsedTwice, NOTHING_FOLLOWS),
        (OptionalUse, NOTHING_FOLLOWS),
        (TwoActivations, NOTHING_FOLLOWS),
        (CalledTwice, "does not call it once"),
        (NotNext, NOTHING_FOLLOWS),
        (Late, NOTHING_FOLLOWS),
        (Either, NOTHING_FOLLOWS),
        (Handed, "does not call it once"),
        (HandsItselfOn, "hands itself on"),
        (Helper, "calls another method"),
        (Inherited, "hands itself on"),
        (Deferred, "runs elsewhere"),
        (ReadsTheWeight, "does not call it once"),
        (Function, NOTHING_FOLLOWS),
        (Unknown, "Tanh is no activation"),
    ],
)
def test_what_cannot_be_shown_is_left_alone(parent, reason):
    model = nn.Sequential(parent())
    report = sparsify(model, 0.5, fuse_activation=True, **SETTINGS)
    assert reason in report.not_fused["0.up"] and model[0].up.activation is None
    assert type(model[0].act) is type(parent().act)
    assert all(layer.activation is None for layer in report.layers)


def _replaced_forward(model):
    model[0].forward = lambda x: x


def _hooked(model):
    model[0].act.register_forward_hook(lambda *_: None)


def _shared(model):
    model.append(model[0].up)


def _subclass(model):
    model[0].act = Subclass()


def _without_source(model):
    space = {"Parent": Parent}
    exec("class Made(Parent):\n    def forward(self, x):\n        return self.act(self.up(x))", space)
    model[0] = space["Made"]()


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_replaced_forward, "has been replaced"),
        (_hooked, "has hooks"),
        (_shared, "several places"),
        (_subclass, NOTHING_FOLLOWS),
        (_without_source, "source"),
    ],
)
def test_what_has_been_tampered_with_is_left_alone(edit, reason):
    model = nn.Sequential(Rebound())
    edit(model)
    report = sparsify(model, 0.5, fuse_activation=True, **SETTINGS)
    assert reason in report.not_fused["0.up"] and model[0].up.activation is None


# To disk and back


@pytest.fixture
def fused():
    """(dense, fused sparse, input)."""
    dense = nn.Sequential(Rebound())
    return dense, sparsify(dense, 0.5, fuse_activation=True, inplace=False, **SETTINGS).model, torch.randn(4, 16)


@pytest.mark.parametrize("into", ["dense", "fused", "unfused", "meta"])
def test_a_saved_model_comes_back_fused(into, fused, tmp_path):
    dense, model, x = fused
    save_sparse(model, tmp_path)
    if into == "meta":
        with torch.device("meta"):
            other = nn.Sequential(Rebound())
    elif into == "dense":
        other = nn.Sequential(Rebound())
    else:
        other = sparsify(dense, 0.25, fuse_activation=into == "fused", inplace=False, **SETTINGS).model
    load_sparse(tmp_path, other)
    assert other[0].up.activation == "silu" and type(other[0].act) is nn.Identity
    assert torch.equal(other(x), model(x))
    assert type(densify(other)[0].act) is nn.SiLU


def test_an_unfused_model_restores_the_activation(fused, tmp_path):
    dense, model, x = fused
    plain = sparsify(dense, 0.5, inplace=False, **SETTINGS).model
    save_sparse(plain, tmp_path)
    load_sparse(tmp_path, model)
    assert model[0].up.activation is None and type(model[0].act) is nn.SiLU and torch.equal(model(x), plain(x))


@pytest.mark.parametrize(("act", "found"), [(nn.ReLU, "ReLU"), (nn.Identity, "Identity"), (None, "none")])
def test_another_activation_in_the_model_is_refused(act, found, fused, tmp_path):
    _, model, _ = fused
    save_sparse(model, tmp_path)
    other = nn.Sequential(Rebound())
    other[0].act = act and act()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(
        BlockSparseError, match=rf"'0.up': its saved silu stands for the module 'act', where the model has {found}"
    ):
        load_sparse(tmp_path, other)
    assert type(other[0].up) is nn.Linear
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


# transformers


FUSED = {
    "bert": {r"intermediate\.dense": "gelu"},
    "gpt2": {r"mlp\.c_fc": "gelu_tanh"},
    "llama": {r"mlp\.gate_proj": "silu"},
    "t5": {r"DenseReluDense\.wi": "relu"},
    "vit": {r"mlp\.fc1": "gelu"},
}


@pytest.mark.parametrize("name", FUSED)
def test_transformers_models_are_fused_and_round_trip(name, tmp_path):
    pytest.importorskip("transformers")
    from model_zoo import BLOCK, MODELS

    import pytorch_block_sparse.hf  # noqa: F401

    case = MODELS[name]
    dense, inputs = case.dense(), case.inputs()
    kinds = {path: type(module) for path, module in dense.named_modules()}
    options = {"block_shape": BLOCK, "exclude": [re.escape(path) for path in case.skip] or None, "inplace": False}
    plain = sparsify(dense, 0.5, **options).model
    report = sparsify(dense, 0.5, fuse_activation=True, **options)
    [(pattern, activation)] = FUSED[name].items()
    found = {layer.name: layer.activation for layer in report.layers if re.search(pattern, layer.name)}
    assert found and set(found.values()) == {activation}
    assert sum(layer.activation is not None for layer in report.layers) == len(found)
    model = report.model
    with torch.no_grad():
        expected = case(model, inputs)
        torch.testing.assert_close(expected, case(plain, inputs), rtol=1e-4, atol=1e-5)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(case(loaded, inputs), expected)
        assert sum(type(module) is nn.Identity for module in loaded.modules()) >= len(found)
        torch.testing.assert_close(case(densify(loaded), inputs), expected, rtol=1e-4, atol=1e-5)
    assert {path: type(module) for path, module in loaded.named_modules()} == kinds
    assert not any(isinstance(module, BlockSparseLinear) for module in loaded.modules())
