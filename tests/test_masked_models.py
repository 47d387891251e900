"""Models pruned with masks by another tool: dense weights with zero blocks, and nn_pruning's mask scores."""

import copy

import pytest
import torch
from torch import nn

from pytorch_block_sparse import BlockPattern, BlockSparseError, BlockSparseLinear
from pytorch_block_sparse.masked_models import apply_mask_scores, patterns_from_zeros, replace_masked_layers

X = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))


def grid_mask(shape, block, kept):
    """A weight's mask that is true in the blocks ``kept``."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, col in kept:
        mask[row * block[0] : (row + 1) * block[0], col * block[1] : (col + 1) * block[1]] = True
    return mask


FIRST = [(0, 0), (2, 1), (4, 2)]  # of 5 x 3 blocks of 8 x 8; the grid's last row is half outside
SECOND = [(0, 4), (1, 1)]  # of 3 x 5


def pruned_model():
    model = nn.Sequential(nn.Linear(24, 36), nn.ReLU(), nn.Linear(36, 24), nn.Linear(24, 24))
    with torch.no_grad():
        model[0].weight *= grid_mask((36, 24), (8, 8), FIRST)
        model[2].weight *= grid_mask((24, 36), (8, 8), SECOND)
    return model


def test_patterns_of_a_model_and_of_its_state_dict():
    model = pruned_model()
    patterns = patterns_from_zeros(model, (8, 8))
    assert {path: sorted(map(tuple, pattern.block_coords.tolist())) for path, pattern in patterns.items()} == {
        "0": FIRST,
        "2": SECOND,
    }
    assert patterns_from_zeros(model.state_dict(), (8, 8)) == patterns


def test_layers_are_replaced_exactly():
    model = pruned_model().eval()
    model[0].bias.requires_grad_(False)
    dense = copy.deepcopy(model)
    patterns = replace_masked_layers(model, (8, 8))
    assert list(patterns) == ["0", "2"] and model[0].pattern is patterns["0"]
    assert [type(layer) for layer in model] == [BlockSparseLinear, nn.ReLU, BlockSparseLinear, nn.Linear]
    assert torch.equal(model[0].weight.to_dense(), dense[0].weight) and torch.equal(model[0].bias, dense[0].bias)
    assert not model[0].training and not model[0].bias.requires_grad and model[0].values.requires_grad
    torch.testing.assert_close(model(X), dense(X))


def test_layers_that_keep_most_blocks_stay_dense():
    model = pruned_model()
    assert list(replace_masked_layers(model, (8, 8), max_density=0.15)) == ["2"]
    assert type(model[0]) is nn.Linear


def test_a_shared_layer_stays_shared():
    model = pruned_model()
    model.append(model[2])
    replace_masked_layers(model, (8, 8))
    assert model[2] is model[4] and isinstance(model[4], BlockSparseLinear)


def test_a_multihead_attention_is_left_alone():
    model = nn.MultiheadAttention(16, 2)
    nn.init.zeros_(model.out_proj.weight)
    assert replace_masked_layers(model, (8, 8)) == {}
    model(*3 * [torch.randn(3, 1, 16)])


def test_conv1d_of_transformers():
    conv1d = pytest.importorskip("transformers").pytorch_utils.Conv1D
    model = nn.Sequential(conv1d(32, 24))
    with torch.no_grad():
        model[0].weight *= grid_mask((32, 24), (8, 8), [(0, 1), (3, 2)]).t()
        model[0].bias.normal_()
    expected = model(X)
    patterns = replace_masked_layers(model, (8, 8))
    assert sorted(map(tuple, patterns["0"].block_coords.tolist())) == [(0, 1), (3, 2)]
    torch.testing.assert_close(model(X), expected)


def tied_model():
    model = pruned_model()
    model.append(nn.Linear(36, 24))
    model[4].weight = model[2].weight
    return model


FULL = BlockPattern.random((36, 24), 1.0, (8, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replace_masked_layers(tied_model(), (8, 8)), "'2' shares its weight with '4'"),
        (lambda: replace_masked_layers({}, (8, 8)), r"model must be a torch.nn.Module, got dict"),
        (lambda: replace_masked_layers(pruned_model(), (8, 0)), r"block_shape\[1\] must be an integer >= 1"),
        (lambda: replace_masked_layers(pruned_model(), max_density=0), r"max_density must be in \(0, 1\], got 0"),
        (lambda: patterns_from_zeros([1]), "source must be a torch.nn.Module or a state dict, got list"),
        (lambda: patterns_from_zeros(pruned_model().to("meta")), "source must hold data, got a meta tensor for '0'"),
    ],
    ids=["tied", "no-model", "block", "max-density", "source", "meta"],
)
def test_refusals(call, message):
    with pytest.raises(BlockSparseError, match=message):
        call()


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"0": FULL, "1": FULL}, "'1' must be an nn.Linear or .* inside the model, got ReLU"),
        ({"0": FULL, "9": FULL}, "'9' must be an nn.Linear or .* got no such module"),
        ({"0": FULL, "2": FULL}, "pattern must have shape"),
        ({"0": FULL, "3": BlockPattern.random((24, 24), 0.5, (8, 8))}, "the pattern of '3' leaves out elements"),
    ],
    ids=["kind", "missing", "shape", "lossy"],
)
def test_refused_patterns_change_nothing(patterns, message):
    model = pruned_model()
    with pytest.raises(BlockSparseError, match=message):
        replace_masked_layers(model, patterns=patterns)
    assert type(model[0]) is nn.Linear


# nn_pruning's scores


def scored_state(scores, second=None, prefix="encoder.dense", key="mask_module.context_modules.0.mask_scores"):
    torch.manual_seed(3)
    state = {f"{prefix}.weight": torch.randn(16, 24), f"{prefix}.bias": torch.randn(16), "norm.weight": torch.ones(4)}
    if scores is not None:
        state[f"{prefix}.{key}"] = scores
    if second is not None:
        state[f"{prefix}.mask_module.context_modules.1.mask_scores"] = second
    return state


SCORES = torch.tensor([[0.1, 3.0, -2.0], [0.5, -0.3, 2.0]])  # blocks of 8 x 8


@pytest.mark.parametrize(
    ("method", "threshold", "kept"),
    [
        ("topK", 0.5, [(0, 1), (1, 0), (1, 2)]),
        ("topK", 0.34, [(0, 1), (1, 2)]),
        ("threshold", 0.3, [(0, 1), (1, 0), (1, 2)]),
        ("threshold", 9.0, [(0, 1)]),  # the least that nn_pruning keeps
        ("sigmoied_threshold", 0.7, [(0, 1), (1, 2)]),
    ],
)
@pytest.mark.parametrize("key", ["mask_module.context_modules.0.mask_scores", "mask_scores"])
def test_mask_scores(method, threshold, kept, key):
    state = scored_state(SCORES, key=key)
    before = {name: tensor.clone() for name, tensor in state.items()}
    dense, patterns = apply_mask_scores(state, threshold, method=method)
    assert sorted(map(tuple, patterns["encoder.dense"].block_coords.tolist())) == kept
    assert patterns["encoder.dense"].block_shape == (8, 8)
    assert dense.keys() == {"encoder.dense.weight", "encoder.dense.bias", "norm.weight"}
    mask = grid_mask((16, 24), (8, 8), kept)
    assert torch.equal(dense["encoder.dense.weight"], state["encoder.dense.weight"] * mask)
    assert all(torch.equal(state[name], before[name]) for name in state), "the input is not changed"
    # The whole way: a dense model, then a sparse one.
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"dense": nn.Linear(24, 16)}), "norm": nn.BatchNorm1d(4)})
    model.load_state_dict(dense, strict=False)
    replace_masked_layers(model, patterns=patterns)
    expected = torch.nn.functional.linear(X, dense["encoder.dense.weight"], dense["encoder.dense.bias"])
    torch.testing.assert_close(model["encoder"]["dense"](X), expected)


def test_what_is_pruned_is_zero_whatever_it_was():
    state = scored_state(SCORES)
    state["encoder.dense.weight"][0, 0] = float("inf")
    dense, _ = apply_mask_scores(state, 0.34)
    assert dense["encoder.dense.weight"][0, 0] == 0 and torch.isfinite(dense["encoder.dense.weight"]).all()


def test_scores_of_rows_and_columns():
    rows, cols = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.5, 1.0])
    _, patterns = apply_mask_scores(scored_state(rows, cols), 0.5)
    assert sorted(map(tuple, patterns["encoder.dense"].block_coords.tolist())) == [(0, 0), (1, 0), (1, 2)]
    state = scored_state(None, cols)
    _, patterns = apply_mask_scores(state, 0.7, method="threshold", block_shape=(4, 8))
    assert patterns["encoder.dense"].grid_shape == (4, 3)
    assert patterns["encoder.dense"].mask().all(0).tolist() == [True, False, True]
    with pytest.raises(
        BlockSparseError, match=r"block_shape must be given: 'encoder.dense' has mask_scores of one side"
    ):
        apply_mask_scores(state, 0.7, method="threshold")


def test_l0_gates_scale_the_weight():
    state = scored_state(SCORES * 4)
    dense, patterns = apply_mask_scores(state, 0.0, method="l0")
    gates = (torch.sigmoid(SCORES * 4) * 1.2 - 0.1).clamp(0, 1)
    assert gates.min() + 1 > 0 and (gates == 0).sum() == 1 and ((gates > 0) & (gates < 1)).sum() >= 2
    expected = state["encoder.dense.weight"] * gates.repeat_interleave(8, 0).repeat_interleave(8, 1)
    assert torch.equal(dense["encoder.dense.weight"], expected)
    assert torch.equal(patterns["encoder.dense"].mask(), gates > 0)


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (
            scored_state(SCORES),
            {"method": "magnitude"},
            "method must be one of topK, threshold, sigmoied_threshold, l0",
        ),
        (scored_state(SCORES), {"threshold": 0}, r"threshold must be in \(0, 1\] for topK, got 0"),
        (scored_state(SCORES), {"threshold": "half"}, "threshold must be a number, got 'half'"),
        (scored_state(torch.ones(3, 3)), {}, r"encoder.dense: mask_scores \[3, 3\] must divide the weight \[16, 24\]"),
        (scored_state(torch.ones(2, 3, 6)), {}, r"mask_scores must be \[R, C\], or \[R\] and \[C\], got"),
        ({"a.mask_scores": SCORES}, {}, r"a.weight must be a matrix beside its mask_scores"),
        (
            {**scored_state(SCORES), "encoder.dense.ampere_module.context_module.mask_scores": SCORES},
            {},
            "2:4 sparsity inside blocks cannot be stored",
        ),
    ],
    ids=["method", "topk", "number", "grid", "dimensions", "no-weight", "ampere"],
)
def test_refused_scores(state, options, message):
    with pytest.raises(BlockSparseError, match=message):
        apply_mask_scores(state, **{"threshold": 0.5, **options})
