"""sparsify() and densify(): which layers are taken, what they hold afterwards, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from pytorch_block_sparse import BlockPattern, BlockSparseError, BlockSparseLinear, densify, sparsify
from pytorch_block_sparse.sparsify import magnitude, movement, taylor
from pytorch_block_sparse.sparsify.calibration import Moments
from pytorch_block_sparse.sparsify.reconstruction import build_regression, refit, removal_costs

BLOCK = (8, 8)


class Attention(nn.Module):
    """Query and key read the same tensor; one layer hangs in two places and runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(24, 32), nn.Linear(24, 32), nn.Linear(32, 24, bias=False)
        self.again = self.shared = nn.Linear(24, 24)

    def forward(self, x, attention_mask=None):
        y = self.out((self.query(x) * self.key(x)).tanh())
        return self.again(self.shared(y).relu())


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 60), nn.GELU(), nn.Linear(60, 33), nn.ReLU(), nn.Linear(33, 16))


def correlated(count: int = 4, tokens: int = 64, features: int = 40) -> list[torch.Tensor]:
    """Inputs with a mean and a low effective rank, as activations have."""
    mixing = torch.randn(features, features) * torch.logspace(0, -2, features)[:, None]
    return [torch.randn(tokens, features) @ mixing + torch.linspace(-1, 1, features) for _ in range(count)]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(before: dict[str, torch.Tensor], model: nn.Module) -> bool:
    after = model.state_dict()
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def output_error(model: nn.Module, dense: nn.Module, batches) -> float:
    with torch.no_grad():
        difference = sum((model(x) - dense(x)).square().sum() for x in batches)
        return float((difference / sum(dense(x).square().sum() for x in batches)).sqrt())


# What is exported


def test_the_function_and_the_package_share_a_name():
    import pytorch_block_sparse.sparsify.importance

    assert callable(pytorch_block_sparse.sparsify)
    assert {"sparsify", "densify", "distill", "SparsifyReport", "BlockSparseModelPatcher"} <= set(
        pytorch_block_sparse.__all__
    )


# Selection


def test_sparse_equals_masked_dense():
    dense = mlp()
    model = copy.deepcopy(dense)
    report = sparsify(model, 0.5, block_shape=BLOCK)
    for layer in report.layers:
        module = dense.get_submodule(layer.name)
        mask = layer.pattern.mask().repeat_interleave(8, 0).repeat_interleave(8, 1)
        module.weight.data *= mask[: module.out_features, : module.in_features]
    x = torch.randn(5, 40)
    torch.testing.assert_close(model(x), dense(x))
    assert report.model is model and [layer.name for layer in report.layers] == ["0", "2", "4"]
    assert all(
        layer.pattern.nnz == round(0.5 * layer.pattern.grid_shape[0] * layer.pattern.grid_shape[1])
        for layer in report.layers
    )


@pytest.mark.parametrize("calibrated", [False, True], ids=["copied", "refitted"])
def test_full_density_is_the_dense_model(calibrated):
    dense, batches = mlp(), correlated()
    report = sparsify(
        dense,
        1.0,
        block_shape=BLOCK,
        inplace=False,
        calibration=batches if calibrated else None,
        importance="obs" if calibrated else "magnitude",
    )
    assert output_error(report.model, dense, batches) < 1e-5
    assert all(isinstance(dense[place], nn.Linear) for place in (0, 2, 4)), "inplace=False leaves the model alone"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"include": r"[02]"}, ["0", "2"]),
        ({"include": ["0", lambda name, module: module.out_features == 16]}, ["0", "4"]),
        ({"include": nn.Linear, "exclude": "2"}, ["0", "4"]),
        ({"rules": {"0": 1.0, r"\d": None}}, ["0"]),
        ({"rules": {"2": 0.25}, "include": "0"}, ["0", "2"]),
        ({"rules": [(lambda name, module: module.in_features == 33, {"density": 0.3})], "include": []}, ["4"]),
    ],
    ids=["regex", "predicate", "type", "rule-none", "rule-and-include", "rule-only"],
)
def test_selection(arguments, expected):
    model = mlp()
    report = sparsify(model, 0.5, block_shape=BLOCK, **arguments)
    assert [layer.name for layer in report.layers] == expected
    assert {name for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)} == set(expected)
    assert set(report.skipped) == {"0", "2", "4"} - set(expected)


def test_rules_set_density_block_and_activation():
    model = mlp()
    sparsify(model, 0.5, block_shape=BLOCK, rules={"0": {"block_shape": (4, 10), "activation": "gelu"}, "2": 0.25})
    assert model[0].block_shape == (4, 10) and model[0].activation == "gelu"
    assert model[2].pattern.nnz == 10 and model[4].density == 0.5


def test_a_shared_module_stays_shared():
    model = Attention()
    sparsify(model, 0.5, block_shape=BLOCK)
    assert model.shared is model.again and isinstance(model.shared, BlockSparseLinear)
    densify(model)
    assert model.shared is model.again and isinstance(model.shared, nn.Linear)


def test_conv1d_goes_and_comes_back():
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(Conv1D(48, 24), nn.ReLU(), nn.Linear(48, 8))
    dense, x = copy.deepcopy(model), torch.randn(7, 24)
    sparsify(model, 1.0, block_shape=BLOCK)
    assert isinstance(model[0], BlockSparseLinear)
    torch.testing.assert_close(model(x), dense(x))
    assert densify(model) is model and isinstance(model[0], Conv1D) and isinstance(model[2], nn.Linear)
    assert same(state(dense), model)


def test_densify_keeps_the_blocks():
    model = mlp()
    sparsify(model, 0.4, block_shape=BLOCK)
    x = torch.randn(3, 40)
    y = model(x)
    assert not any(isinstance(module, BlockSparseLinear) for module in densify(model).modules())
    torch.testing.assert_close(model(x), y)
    fused = nn.Sequential(BlockSparseLinear(8, 8, block_shape=BLOCK), BlockSparseLinear(8, 8, activation="relu"))
    with pytest.raises(BlockSparseError, match="1 has 'relu'"):
        densify(fused)
    assert isinstance(fused[0], BlockSparseLinear), "nothing is changed"


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embedding": nn.Embedding(50, 16), "body": nn.Linear(16, 16), "head": nn.Linear(16, 50)})
    model["head"].weight = model["embedding"].weight
    return model


def test_a_weight_tied_to_an_embedding_stays_dense_or_is_refused():
    model = tied()
    report = sparsify(model, 0.5, block_shape=BLOCK)
    assert "shares a parameter" in report.skipped["head"] and [layer.name for layer in report.layers] == ["body"]
    assert model["head"].weight is model["embedding"].weight
    model = tied()
    with pytest.raises(BlockSparseError, match="head shares a parameter"):
        sparsify(model, 0.5, block_shape=BLOCK, include="head|body")
    assert isinstance(model["body"], nn.Linear)


def test_torch_modules_that_read_weights_themselves_keep_working():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 16)).eval()
    report = sparsify(model, 0.5, block_shape=BLOCK)
    assert [layer.name for layer in report.layers] == ["1"] and len(report.skipped) == 3
    with torch.no_grad():
        model(torch.randn(2, 5, 16))


def test_parameters_and_mode_carry_over():
    model = mlp().double().eval()
    model[0].weight.requires_grad_(False)
    sparsify(model, 0.5, block_shape=BLOCK)
    assert model[0].values.dtype == torch.float64 and not model[0].values.requires_grad
    assert model[2].values.requires_grad and not model[0].training


def test_training_steps_equal_masked_dense_training():
    model, masked = mlp(), mlp()
    report = sparsify(model, 0.5, block_shape=BLOCK)
    masks = {
        layer.name: layer.pattern.mask().repeat_interleave(8, 0).repeat_interleave(8, 1) for layer in report.layers
    }
    masks = {
        name: mask[: masked.get_submodule(name).out_features, : masked.get_submodule(name).in_features]
        for name, mask in masks.items()
    }
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, masked)]
    for _ in range(20):
        x, y = torch.randn(16, 40), torch.randn(16, 16)
        for name, mask in masks.items():
            masked.get_submodule(name).weight.data *= mask
        for network, optimizer in zip((model, masked), optimizers, strict=True):
            optimizer.zero_grad()
            (network(x) - y).square().mean().backward()
            optimizer.step()
    for name, mask in masks.items():
        torch.testing.assert_close(
            model.get_submodule(name).weight.to_dense(), masked.get_submodule(name).weight * mask, rtol=1e-4, atol=1e-5
        )


# The report


def test_report(tmp_path):
    model, batches = mlp(), correlated()
    report = sparsify(model, 0.5, block_shape=BLOCK, exclude="4", calibration=batches)
    facts = json.loads(json.dumps(report.to_dict()))
    assert facts["refit"] and facts["skipped"] == {"4": "excluded"} and facts["importance"] == "magnitude_l2"
    first = facts["layers"][0]
    assert first["parameters_before"] == 40 * 60 + 60 and first["bytes_before"] == 4 * (40 * 60 + 60)
    assert first["parameters"] == model[0].weight.numel() + 60
    assert first["bytes"] == model[0].values.nbytes + 4 * 60 + model[0].block_coords.nbytes
    lines = str(report).splitlines()
    assert lines[0].split()[0] == "layer" and lines[1].split()[0] == "0" and "left dense: 4 (excluded)" in lines
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "report.png")
    BlockPattern.banded((64, 64), BLOCK).plot(tmp_path / "pattern.png")
    for name in ("report.png", "pattern.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_plot_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(BlockSparseError, match=r"matplotlib.*pytorch_block_sparse\[plot\]"):
        BlockPattern.banded((64, 64), BLOCK).plot()


def test_reported_output_error_is_the_models():
    """The last layer's error, from streamed moments, is that of the model's output."""
    dense, batches = mlp(), correlated()
    for refitted in (False, True):
        report = sparsify(
            dense,
            0.5,
            block_shape=BLOCK,
            calibration=batches,
            refit=refitted,
            inplace=False,
            include=".*" if refitted else "4",
        )
        assert report.layers[-1].output_error == pytest.approx(output_error(report.model, dense, batches), rel=1e-4)


@pytest.mark.parametrize("importance", ["magnitude", "obs"])
def test_dry_run_reports_what_a_run_does(importance):
    model, batches = mlp(), correlated()
    before, modules = state(model), list(model)
    options = {"block_shape": BLOCK, "importance": importance, "calibration": batches}
    dry = sparsify(model, 0.5, dry_run=True, **options)
    assert all(now is then for now, then in zip(model, modules, strict=True)) and same(before, model) and dry.dry_run
    assert "dry run" in str(dry) and dry.model is model
    assert dry.to_dict()["layers"] == sparsify(model, 0.5, **options).to_dict()["layers"]


# Refusals change nothing


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)


class NeedsLabels(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 0}, r"density must be a number in \(0, 1\], got 0"),
        ({"density": float("nan")}, "density must be a number"),
        ({"block_shape": (0, 8)}, r"block_shape\[0\] must be an integer"),
        ({"importance": "size"}, "importance must be one of magnitude, .*got 'size'"),
        ({"importance": "wanda"}, "calibration must be given for importance 'wanda'"),
        ({"allocation": "fair"}, "allocation must be one of uniform, .*got 'fair'"),
        ({"allocation": "error"}, "calibration must be given for allocation 'error'"),
        ({"refit": True}, "calibration must be given for refit"),
        ({"calibration": []}, "calibration must hold at least one batch"),
        ({"calibration": torch.zeros(2, 16)}, "calibration must be an iterable of model inputs"),
        ({"calibration": [3]}, "calibration must hold mappings, tuples or tensors, got int at place 0"),
        ({"calibration": [torch.randn(4, 16)]}, "does not reach unused"),
        ({"calibration": [torch.full((4, 16), torch.nan)], "include": "used"}, "must give every layer finite inputs"),
        ({"calibration": [torch.randn(4, 16)], "include": "used", "importance": "taylor"}, "return a loss"),
        ({"include": "nowhere"}, "include must match a linear layer's whole name, got 'nowhere'"),
        ({"exclude": "("}, "exclude must hold valid regular expressions"),
        ({"include": 3}, "include must be a selector"),
        ({"rules": {"used": {"densty": 1}}}, "rules must set some of density, block_shape, activation"),
        ({"rules": {"used": 2.0}}, "density must be a number"),
        ({"rules": {"used": {"activation": "sine"}}}, "activation must be None or one of"),
        ({"exclude": nn.Linear}, "model must hold a linear layer"),
        ({"importance": lambda context: torch.zeros(1, 1)}, "importance must score the block grid"),
        ({"importance": lambda context: torch.full((2, 2), torch.nan)}, "got nan"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.split(",")[0][:40],
)
def test_refusals_change_nothing(arguments, message):
    model = NeedsLabels()
    before = state(model)
    with pytest.raises(BlockSparseError, match=message):
        sparsify(model, **{"block_shape": BLOCK, **arguments})
    assert same(before, model) and model.training and not model.used._forward_pre_hooks


def test_a_model_that_fails_half_way_is_put_back():
    class Picky(TwoLayers):
        def forward(self, x):
            if isinstance(self.first, BlockSparseLinear):
                raise RuntimeError("not like this")
            return self.second(self.first(x))

    model = Picky()
    before = state(model)
    with pytest.raises(RuntimeError, match="not like this"):
        sparsify(model, 0.5, block_shape=BLOCK, calibration=[torch.randn(64, 16)])
    assert same(before, model) and isinstance(model.first, nn.Linear) and model.training


# Importance


def test_magnitude_and_custom_importance_choose_the_blocks():
    model = nn.Sequential(nn.Linear(32, 32))
    weight = torch.full((32, 32), 0.1)
    weight[8:16, 16:24] = 0.0
    weight[8, 16] = 3.0  # one large weight: largest L2 norm, not the largest L1
    model[0].weight.data = weight
    for importance, kept in ((magnitude(2), True), ("magnitude_l1", False)):
        report = sparsify(model, 1 / 16, block_shape=BLOCK, importance=importance, inplace=False)
        assert bool(report.layers[0].pattern.mask()[1, 2]) is kept
    wish = torch.zeros(4, 4).index_put((torch.tensor([3]), torch.tensor([1])), torch.tensor(1.0))
    report = sparsify(model, 1 / 16, block_shape=BLOCK, importance=lambda context: wish, inplace=False)
    assert report.layers[0].pattern.block_coords.tolist() == [[3, 1]]


def test_wanda_weighs_inputs_by_their_norm():
    model = nn.Sequential(nn.Linear(16, 8))
    model[0].weight.data = torch.cat((torch.ones(8, 8), torch.full((8, 8), 0.5)), 1)
    x = torch.randn(100, 16) * torch.cat((torch.ones(8), torch.full((8,), 10.0)))
    options = {"block_shape": BLOCK, "inplace": False, "calibration": [x], "refit": False}
    assert sparsify(model, 0.5, importance="magnitude", **options).layers[0].pattern.mask().tolist() == [[True, False]]
    assert sparsify(model, 0.5, importance="wanda", **options).layers[0].pattern.mask().tolist() == [[False, True]]


def test_wanda_does_not_count_masked_tokens():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x, attention_mask):
            return self.layer(x)

    model, x = Wrapper(), torch.randn(2, 5, 16)
    x[:, 3:, 8:] = 1e3
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 2)
    report = sparsify(
        model,
        0.5,
        block_shape=BLOCK,
        importance="wanda",
        refit=False,
        inplace=False,
        calibration=[{"x": x, "attention_mask": mask}],
    )
    alone = sparsify(
        model,
        0.5,
        block_shape=BLOCK,
        importance="wanda",
        refit=False,
        inplace=False,
        calibration=[(x[:, :3], mask[:, :3])],
    )
    assert report.layers[0].output_error == pytest.approx(alone.layers[0].output_error, rel=1e-5)


def test_taylor_and_movement_read_the_gradient():
    model = nn.Sequential(nn.Linear(24, 8, bias=False))
    model[0].weight.data.fill_(1.0)
    # The loss falls where the first block grows, rises where the second does, and ignores the third.
    x = torch.cat((torch.full((4, 8), 1.0), torch.full((4, 8), -2.0), torch.zeros(4, 8)), 1)
    options = {"block_shape": BLOCK, "inplace": False, "calibration": [x], "refit": False}

    def loss(output, batch):
        return -output.sum()

    def kept(importance):
        return sparsify(model, 1 / 3, importance=importance, **options).layers[0].pattern.block_coords.tolist()

    assert kept(taylor(loss)) == [[0, 1]], "the largest first-order change, of either sign"
    assert kept(movement(loss)) == [[0, 0]], "the block that moves away from zero"
    assert model[0].weight.grad is None


def test_random_importance_follows_the_seed():
    masks = []
    for seed in (1, 1, 2):
        model = mlp()
        torch.manual_seed(seed)
        masks.append(sparsify(model, 0.5, block_shape=BLOCK, importance="random").layers[0].pattern.mask())
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


# Reconstruction


def moments_of(x: torch.Tensor, z: torch.Tensor | None = None) -> Moments:
    moments = Moments(x.shape[1], x.shape[1])
    for part, other in zip(x.split(50), (x if z is None else z).split(50), strict=True):
        moments.add(part, other)
    return moments


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
def test_refit_is_the_least_squares_solution(with_bias):
    """Against numpy's solver on the data themselves, with inputs of the sparse model unlike the dense one's."""
    z = torch.cat(correlated(features=20)).double()
    x = z + 0.1 * torch.randn_like(z)
    weight, bias = torch.randn(12, 20).double(), torch.randn(12).double() if with_bias else None
    regression = build_regression(weight, bias, moments_of(x), moments_of(x, z), damping=0.0)
    mask = torch.tensor([[True, False, True], [False, True, False], [False, False, False]])
    found = refit(regression, mask, (5, 8))
    target = z @ weight.t() + (0 if bias is None else bias)
    columns = mask.repeat_interleave(8, 1)[:, :20].repeat_interleave(5, 0)[:12]
    for output in range(12):
        inside = columns[output].nonzero()[:, 0]
        design = x[:, inside]
        if with_bias:
            design = torch.cat((design, torch.ones(x.shape[0], 1).double()), 1)
        if design.shape[1]:
            expected = torch.linalg.lstsq(design, target[:, output, None]).solution[:, 0]
            torch.testing.assert_close(found[output, inside], expected[: inside.numel()], rtol=1e-5, atol=1e-7)
            if with_bias:
                torch.testing.assert_close(regression.bias(found)[output], expected[-1], rtol=1e-5, atol=1e-7)
    assert not found[~columns].any()


def regression_error(regression, weight) -> float:
    difference = weight - regression.target
    return float(((difference @ regression.hessian) * difference).sum())


def test_removal_costs_are_the_errors_that_refitting_leaves():
    """One block row: the cost of each removal is the rise of the least-squares error, in the order of removal."""
    x = torch.cat(correlated(features=40)).double()
    regression = build_regression(torch.randn(6, 40).double(), torch.zeros(6).double(), moments_of(x))
    costs = removal_costs(regression, (6, 8))
    assert costs.shape == (1, 5)
    order = costs[0].argsort()
    mask, before = torch.ones(1, 5, dtype=torch.bool), 0.0
    highest = 0.0
    for block in order.tolist():
        alternatives = []
        for other in mask[0].nonzero()[:, 0].tolist():
            trial = mask.clone()
            trial[0, other] = False
            alternatives.append((regression_error(regression, refit(regression, trial, (6, 8))), other))
        assert min(alternatives)[1] == block, "the cheapest block goes first"
        highest = max(highest, min(alternatives)[0] - before)
        assert float(costs[0, block]) == pytest.approx(highest, rel=1e-3)
        before = min(alternatives)[0]
        mask[0, block] = False


def test_removal_costs_do_not_depend_on_what_lies_past_the_edge():
    x = torch.cat(correlated(features=37)).double()
    weight = torch.randn(13, 37).double()
    costs = removal_costs(build_regression(weight, None, moments_of(x)), (8, 8))
    assert costs.shape == (2, 5) and torch.isfinite(costs).all() and (costs > 0).all()
    wide = torch.cat((x, 1e-3 * torch.randn(x.shape[0], 3)), 1)
    wide_weight = torch.nn.functional.pad(weight, (0, 3, 0, 3))
    padded = removal_costs(build_regression(wide_weight, None, moments_of(wide)), (8, 8))
    torch.testing.assert_close(costs, padded, rtol=0.1, atol=0)


def test_refitting_beats_copying_and_obs_selects_best():
    model, batches = nn.Sequential(nn.Linear(96, 64)), correlated(8, features=96)
    errors = {}
    for name, refitted in (("magnitude", False), ("magnitude", True), ("wanda", True), ("obs", True)):
        report = sparsify(
            model, 0.4, block_shape=BLOCK, importance=name, calibration=batches, refit=refitted, dry_run=True
        )
        errors[name, refitted] = report.layers[0].output_error
    assert errors["magnitude", True] < 0.7 * errors["magnitude", False], errors
    assert errors["obs", True] < 0.95 * min(errors["wanda", True], errors["magnitude", True]), errors


def test_shared_inputs_and_repeated_calls_are_calibrated():
    model = Attention().eval()
    dense, batches = copy.deepcopy(model), [torch.randn(3, 50, 24) for _ in range(4)]
    report = sparsify(model, 0.5, block_shape=BLOCK, importance="obs", calibration=batches)
    assert [layer.name for layer in report.layers] == ["query", "key", "out", "again"]
    assert output_error(model, dense, batches) < 0.9
    plain = sparsify(dense, 0.5, block_shape=BLOCK, inplace=False).model
    assert output_error(model, dense, batches) < 0.8 * output_error(plain, dense, batches)


def test_an_input_changed_in_place_between_two_layers_is_not_shared():
    class InPlace(TwoLayers):
        def forward(self, x):
            x = x + 0
            y = self.first(x)
            return y + self.second(x.relu_())

    model, batches = InPlace(), [torch.randn(64, 16)]
    found = sparsify(model, 0.5, block_shape=BLOCK, calibration=batches, refit=False, inplace=False)
    second = found.model.second
    with torch.no_grad():
        x = batches[0].relu()
        expected = float((second(x) - model.second(x)).norm() / model.second(x).norm())
    assert found.layers[1].output_error == pytest.approx(expected, rel=1e-4)


def test_few_tokens_and_dead_inputs_are_survived():
    model = mlp()
    x = torch.randn(3, 40)
    x[:, :16] = 0
    report = sparsify(model, 0.5, block_shape=BLOCK, importance="obs", calibration=[x])
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert all(layer.output_error < 1 for layer in report.layers)


def test_bfloat16_models_are_calibrated():
    model = mlp().bfloat16()
    report = sparsify(model, 0.5, block_shape=BLOCK, importance="obs", calibration=[x.bfloat16() for x in correlated()])
    assert model[0].values.dtype == torch.bfloat16 and all(layer.output_error < 0.7 for layer in report.layers)


# Allocation


@pytest.mark.parametrize("allocation", ["uniform", "global", "erk", "error"])
def test_allocations_keep_the_budget(allocation):
    model = mlp()
    options = {"calibration": correlated(), "importance": "obs"} if allocation == "error" else {}
    report = sparsify(model, 0.4, block_shape=BLOCK, allocation=allocation, **options)
    uniform = sparsify(mlp(), 0.4, block_shape=BLOCK)
    total = sum(layer.pattern.nnz for layer in report.layers)
    assert abs(total - sum(layer.pattern.nnz for layer in uniform.layers)) <= len(report.layers)
    assert all(layer.pattern.nnz >= 1 for layer in report.layers)


def test_global_allocation_follows_the_scores_and_leaves_pinned_layers_alone():
    model = mlp()
    model[0].weight.data *= 100
    report = sparsify(model, 0.4, block_shape=BLOCK, allocation="global", rules={"4": 0.5})
    first, second, pinned = report.layers
    assert first.density > 0.6 and second.pattern.nnz == 1 and pinned.density == 0.5


def test_erdos_renyi_keeps_small_layers_denser():
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 32), nn.Linear(32, 16))
    densities = [layer.density for layer in sparsify(model, 0.3, block_shape=BLOCK, allocation="erk").layers]
    assert densities[0] < densities[1] < densities[2]
    expected = [(128 + 128) / (128 * 128), (128 + 32) / (128 * 32)]
    assert densities[0] / densities[1] == pytest.approx(expected[0] / expected[1], rel=0.05)


def test_error_allocation_gives_to_the_layer_that_needs_it():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        # The first layer's weight has one block column that matters; the second's blocks matter alike.
        model[0].weight[:, 8:] *= 1e-3
    batches = [torch.randn(256, 64) for _ in range(2)]
    report = sparsify(
        model, 0.4, block_shape=BLOCK, allocation="error", calibration=batches, importance="obs", dry_run=True
    )
    assert report.layers[0].density < 0.3 < 0.5 < report.layers[1].density
    assert report.density == pytest.approx(0.4, abs=0.02)
