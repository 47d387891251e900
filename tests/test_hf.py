"""save_pretrained and from_pretrained of models with BlockSparseLinear layers."""

import copy
import importlib
import json
import sys

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import model_zoo
import transformers
from model_zoo import MODELS, make_sparse
from safetensors.torch import load_file, save_file

import pytorch_block_sparse.hf
from pytorch_block_sparse import BlockSparseError, BlockSparseLinear, cli
from pytorch_block_sparse.optional import MissingPackageError

transformers.logging.disable_progress_bar()


def sparse_model(name, density=0.5):
    case = MODELS[name]
    return make_sparse(case.dense(), density, case.skip)


def assert_same_state(model, other):
    expected, found = model.state_dict(), other.state_dict()
    assert expected.keys() == found.keys()
    for key in expected:
        assert expected[key].dtype == found[key].dtype and torch.equal(expected[key], found[key]), key


def assert_same_model(model, other, case):
    assert_same_state(model, other)
    inputs = case.inputs()
    with torch.no_grad():
        assert torch.equal(case(model, inputs), case(other, inputs))


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_bitwise(name, tmp_path):
    model = sparse_model(name)
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "quantization_config"), "saving leaves the model as it was"
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["version"]) == ("block_sparse", 1)
    other = type(model).from_pretrained(tmp_path)
    assert sum(isinstance(module, BlockSparseLinear) for module in other.modules()) == len(config["layers"]) > 0
    assert_same_model(model, other, MODELS[name])
    # And again from what was loaded.
    other.save_pretrained(tmp_path / "again")
    assert_same_model(model, type(model).from_pretrained(tmp_path / "again"), MODELS[name])


def test_auto_classes_and_shards(tmp_path):
    model = sparse_model("bert")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    other = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_same_model(model, other, MODELS["bert"])


def test_the_base_model_of_a_model_with_a_head_and_back(tmp_path):
    model = sparse_model("bert")
    model.save_pretrained(tmp_path / "whole")
    base = transformers.AutoModel.from_pretrained(tmp_path / "whole")
    assert type(base) is transformers.BertModel
    inputs = MODELS["bert"].inputs()
    expected = model.bert(**inputs).pooler_output
    assert torch.equal(base(**inputs).pooler_output, expected)
    base.save_pretrained(tmp_path / "base")
    with_head = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    assert torch.equal(with_head.bert(**inputs).pooler_output, expected)


def test_a_sparse_head_is_left_out_of_the_base_model(tmp_path):
    model = make_sparse(MODELS["llama"].dense(), 0.5)
    assert isinstance(model.lm_head, BlockSparseLinear)
    model.save_pretrained(tmp_path)
    inputs = MODELS["llama"].inputs()
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base(**inputs).last_hidden_state, model.model(**inputs).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_dtype_on_loading(name, dtype, tmp_path):
    model = sparse_model(name)
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path, dtype=dtype)
    # The outputs may differ: transformers keeps rotary frequencies in float32, where to() casts them.
    assert_same_state(copy.deepcopy(model).to(dtype), other)
    assert torch.isfinite(MODELS[name](other, MODELS[name].inputs())).all()


def test_layers_that_the_model_class_keeps_in_float32(tmp_path):
    model = sparse_model("t5")
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path, dtype=torch.float16)
    layer = other.encoder.block[0].layer[1].DenseReluDense
    assert (layer.wi.values.dtype, layer.wo.values.dtype) == (torch.float16, torch.float32)
    inputs = MODELS["t5"].inputs()
    with torch.no_grad():
        torch.testing.assert_close(other(**inputs).logits.float(), model(**inputs).logits, atol=0.05, rtol=0.05)


def test_a_loaded_model_is_an_ordinary_one(tmp_path):
    model = sparse_model("bert")
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path)
    assert not getattr(other, "is_quantized", False) and getattr(other, "hf_quantizer", None) is None
    assert other.half().float().bert.encoder.layer[0].output.dense.values.dtype == torch.float32
    other.train()(**MODELS["bert"].inputs(), labels=torch.tensor([0, 1])).loss.backward()
    layer = other.bert.encoder.layer[0].output.dense
    assert layer.values.requires_grad and layer.values.grad.abs().sum() > 0
    trainer_check = transformers.trainer_utils.validate_quantization_for_training
    trainer_check(other)  # what Trainer asks of a model


def test_a_changed_pattern_is_what_is_saved(tmp_path):
    model = sparse_model("llama")
    model.save_pretrained(tmp_path)
    layer = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = BlockSparseLinear(32, 72, bias=False, density=0.1, block_shape=(4, 4))
    assert layer.block_shape != (4, 4)
    model.save_pretrained(tmp_path)
    assert_same_model(model.eval(), type(model).from_pretrained(tmp_path), MODELS["llama"])


def test_a_dense_model_is_saved_as_ever(tmp_path):
    model = MODELS["bert"].dense()
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert_same_model(model, type(model).from_pretrained(tmp_path), MODELS["bert"])


# Refusals


LAYER = "bert.encoder.layer.0.output.dense"


def change_config(path, change):
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))


def change_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def record(config, **fields):
    next(layer for layer in config["layers"] if layer["path"] == LAYER).update(fields)


REFUSALS = {
    "version": (lambda config: config.update(version=7), None, "quantization_config: version must be 1, got 7"),
    "no-version": (lambda config: config.pop("version"), None, "quantization_config: version must be 1, got None"),
    "layers": (lambda config: config.update(layers="all"), None, "quantization_config: layers must be a list, got str"),
    "damaged-record": (
        lambda config: record(config, nnz=-1),
        None,
        rf"quantization_config: layer '{LAYER}': nnz must be an integer",
    ),
    "unknown-layer": (
        lambda config: record(config, path="bert.nothing"),
        None,
        "quantization_config: layer 'bert.nothing': the model has no such module",
    ),
    "shape": (
        lambda config: record(config, shape=[64, 72]),
        None,
        rf"layer '{LAYER}': saved with \(out_features, in_features\) = \(64, 72\), the model has \(32, 72\)",
    ),
    "bias": (lambda config: record(config, bias=False), None, rf"layer '{LAYER}': saved without a bias"),
    "nnz": (
        lambda config: record(config, nnz=3),
        None,
        rf"layer '{LAYER}': values must be \(3, 16, 8\) as config.json says, the file has \(9, 16, 8\)",
    ),
    "missing-values": (
        None,
        lambda tensors: tensors.pop(f"{LAYER}.values"),
        rf"layer '{LAYER}': values is missing in the file",
    ),
    "missing-coordinates": (
        None,
        lambda tensors: tensors.pop(f"{LAYER}.block_coords"),
        rf"layer '{LAYER}': block_coords is missing in the file",
    ),
    "missing-bias": (None, lambda tensors: tensors.pop(f"{LAYER}.bias"), rf"layer '{LAYER}': bias is missing"),
    "dense-in-the-file": (
        None,
        lambda tensors: tensors.update({f"{LAYER}.weight": tensors.pop(f"{LAYER}.values").flatten()}),
        rf"layer '{LAYER}': values is missing in the file",
    ),
    "out-of-range": (
        None,
        lambda tensors: tensors[f"{LAYER}.block_coords"].fill_(1000),
        rf"layer '{LAYER}': block_coords: every block row must be from 0 to 1, got 1000 to 1000",
    ),
    "duplicates": (
        None,
        lambda tensors: tensors[f"{LAYER}.block_coords"].zero_(),
        rf"layer '{LAYER}': block_coords must not hold a block twice",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_damage_is_named(case, tmp_path):
    config, tensors, message = REFUSALS[case]
    model = sparse_model("bert")
    model.save_pretrained(tmp_path)
    if config:
        change_config(tmp_path, config)
    if tensors:
        change_tensors(tmp_path, tensors)
    with pytest.raises(BlockSparseError, match=message):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("keep", [50, -7])
def test_a_truncated_file_is_named(keep, tmp_path):
    model = sparse_model("bert")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BlockSparseError, match=r"model.safetensors: truncated, or no safetensors file"):
        type(model).from_pretrained(tmp_path)


def test_a_dense_checkpoint_is_not_loaded_as_sparse(tmp_path):
    model = MODELS["bert"].dense()
    model.save_pretrained(tmp_path)
    config = pytorch_block_sparse.hf.BlockSparseConfig.of(sparse_model("bert"))
    with pytest.raises(BlockSparseError, match="a dense checkpoint cannot be loaded as a block-sparse one"):
        type(model).from_pretrained(tmp_path, quantization_config=config)


def test_a_model_without_any_of_the_layers_is_refused(tmp_path):
    sparse_model("bert").save_pretrained(tmp_path)
    change_config(tmp_path, lambda config: [layer.update(path="x" + layer["path"]) for layer in config["layers"]])
    with pytest.raises(BlockSparseError, match="BertModel has none of the sparse layers"):
        transformers.BertModel.from_pretrained(tmp_path)


def test_a_tied_layer_is_refused_before_anything_is_written(tmp_path):
    model = sparse_model("gpt2")
    model.lm_head = BlockSparseLinear.from_linear(model.lm_head, density=0.5)
    with pytest.raises(BlockSparseError, match=r"layer 'lm_head' is block sparse, but config.tie_word_embeddings"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "pytorch_block_sparse.hf")
    monkeypatch.setitem(sys.modules, "transformers.quantizers.auto", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'pytorch_block_sparse\[transformers\]'"):
        importlib.import_module("pytorch_block_sparse.hf")


def test_conv1d_is_remembered(tmp_path):
    sparse_model("gpt2").save_pretrained(tmp_path)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert model.transformer.h[0].mlp.c_fc.dense_origin.layer_type is transformers.pytorch_utils.Conv1D


def test_info_shows_a_pretrained_directory(tmp_path, capsys):
    sparse_model("gpt2").save_pretrained(tmp_path)
    assert cli.main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "8 block-sparse layers" in text and "transformer.h.1.mlp.c_proj" in text and model_zoo.BLOCK == (16, 8)
    change_config(tmp_path, lambda config: config.update(quant_method="other"))
    with pytest.raises(SystemExit):
        cli.main(["info", str(tmp_path)])
    assert "the model has no block-sparse layers" in capsys.readouterr().err
