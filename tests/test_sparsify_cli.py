"""``python -m pytorch_block_sparse sparsify``: a small saved model goes in, a sparse one comes out and loads."""

from __future__ import annotations

import json

import pytest
import torch

from pytorch_block_sparse import BlockSparseLinear, cli

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
checkpoint = pytest.importorskip("pytorch_block_sparse.checkpoint")

TEXT = "\n\n".join(f"the {noun} {verb} over the {noun}" for noun in ("cat", "dog", "fox") for verb in ("runs", "jumps"))


@pytest.fixture
def saved_model(tmp_path):
    """A BERT with random weights and a tokenizer of ten words."""
    torch.manual_seed(0)
    folder = tmp_path / "model"
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=16,
    )
    transformers.BertModel(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(TEXT.split()))]
    vocabulary = {word: place for place, word in enumerate(words)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return folder


def test_sparsify_saves_a_model_that_loads(saved_model, tmp_path, capsys):
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    arguments = ["sparsify", str(saved_model), str(output), "--density", "0.5", "--block", "16", "--device", "cpu"]
    assert cli.main([*arguments, "--calibration", str(text), "--exclude", r"pooler\..*", "--fuse-activation"]) == 0
    printed = capsys.readouterr()
    assert "encoder.layer.1.output.dense" in printed.out and "importance obs" in printed.out
    assert "sparsify" in printed.err, "the progress bar"
    facts = json.loads((output / "sparsify.json").read_text())
    assert facts["refit"] and facts["density"] == pytest.approx(0.5) and len(facts["layers"]) == 12
    model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(output))
    checkpoint.load_sparse(output, model)
    assert model.encoder.layer[0].intermediate.dense.activation == "gelu"
    layers = [module for module in model.modules() if isinstance(module, BlockSparseLinear)]
    assert len(layers) == 12 and {layer.block_shape for layer in layers} == {(16, 16)}
    tokens = transformers.AutoTokenizer.from_pretrained(output)("the cat runs", return_tensors="pt")
    assert torch.isfinite(model(**tokens).last_hidden_state).all()


def test_without_calibration_the_strongest_blocks_are_kept(saved_model, tmp_path, capsys):
    assert cli.main(["sparsify", str(saved_model), str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert "importance magnitude_l2, allocation uniform, not refitted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--density", "2"], "density must be a number in (0, 1], got 2.0"),
        (["--block", "0"], "argument --block: must be a positive integer, got 0"),
        (["--calibration", "nowhere.txt"], "argument --calibration: must be a readable text file, got nowhere.txt"),
        (["--include", "nothing"], "include must match a linear layer's whole name, got 'nothing'"),
        (["--importance", "wanda"], "calibration must be given for importance 'wanda'"),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) else "",
)
def test_refusals_save_nothing(saved_model, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["sparsify", str(saved_model), str(tmp_path / "out"), "--device", "cpu", *arguments])
    assert exit_info.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["sparsify", str(tmp_path), str(tmp_path / "out")])
    assert "argument MODEL_DIR: must hold a config.json" in capsys.readouterr().err
