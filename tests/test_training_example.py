"""examples/train_sparse_gpt.py from end to end, with tiny settings."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import assert_refuses, load_script

from pytorch_block_sparse import BlockSparseLinear

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_sparse_gpt.py"

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("matplotlib", "tqdm")),
    reason="the example's packages are not installed: pip install pytorch_block_sparse[demo]",
)


@pytest.fixture(scope="module")
def example():
    """The script as a module."""
    return load_script(SCRIPT)


def test_example_trains_three_models_and_draws_their_curves(tmp_path):
    command = [
        *(sys.executable, str(SCRIPT), "--steps", "24", "--width", "64", "--layers", "1", "--characters", "20000"),
        *("--density", "0.5", "--device", "cpu", "--output", str(tmp_path / "new")),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {fields[0]: fields[1:] for fields in map(str.split, done.stdout.splitlines()) if fields}
    # parameters, M, ms/step, speed-up, held-out loss, bits/char, blocks moved
    dense, static, rigl = (rows[name] for name in ("dense", "static", "RigL"))
    assert float(static[0]) == float(rigl[0]) == pytest.approx(float(dense[0]) / 2, abs=0.01)
    assert all(re.fullmatch(r"\d+\.\d+x", row[3]) for row in (dense, static, rigl))
    assert all(2 < float(row[4]) < 4 for row in (dense, static, rigl)), "below the 4.5 of a uniform guess"
    assert [int(row[6]) > 0 for row in (dense, static, rigl)] == [False, False, True]
    assert static[4] != rigl[4]
    assert "RigL" in done.stderr and "held-out loss" in done.stderr, "the progress bar"
    assert (tmp_path / "new" / "train_sparse_gpt.png").read_bytes().startswith(b"\x89PNG")


def test_text_is_docstrings_split_by_module(example):
    training, held_out = example.read_text(50_000)
    assert (len(training), len(held_out)) == (50_000, 2_500)
    assert held_out[:200] not in training and training.isascii()
    assert example.read_text(50_000) == (training, held_out), "the same text every time"
    assert sum(word in training for word in ("Return", "the", "file", "object")) == 4


def test_sparse_models_begin_alike_and_attention_looks_back_only(example):
    options = type("Options", (), {"density": 0.5, "block": 16, "width": 64, "layers": 2, "device": "cpu"})
    static, rigl = (example.make_model(name, 90, options) for name in ("static", "RigL"))
    assert all(torch.equal(entry, rigl.state_dict()[name]) for name, entry in static.state_dict().items())
    assert sum(isinstance(module, BlockSparseLinear) for module in static.modules()) == 8
    tokens = torch.randint(90, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = 0
    torch.testing.assert_close(static(tokens)[:, :8], static(changed)[:, :8])
    assert not torch.allclose(static(tokens)[:, 8:], static(changed)[:, 8:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--width", "100"], "argument --width: must be a multiple of 64, got 100"),
        (["--density", "2"], "argument --density: must be in (0, 1], got 2.0"),
        (["--characters", "5"], "argument --characters: must be at least 10000, got 5"),
        (["--learning-rate", "0"], "argument --learning-rate: must be positive, got 0.0"),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) else "",
)
def test_example_refuses(arguments, message, example, monkeypatch, capsys):
    assert_refuses(example, arguments, message, monkeypatch, capsys)
