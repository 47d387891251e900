"""The measuring scripts under benchmarks/, on small problems: what they write, and that plot.py reads it."""

import json
from pathlib import Path

import pytest
import torch
from scripts import load_script

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py", *map(str, arguments)])
    assert not load_script(BENCHMARKS / f"{name}.py").main()


def test_layer(tmp_path, monkeypatch, capsys, device):
    path = tmp_path / "layer.json"
    options = ["--device", device.type, "--shape", 24, 48, 80, "--dtype", "float32", "--block", 16]
    run("layer", monkeypatch, *options, "--density", 0.5, "--compiled", "--seconds", 0.01, "--json", path)
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    assert row["operator"] == "forward + backward, eager" and row["block"] == 16 and row["error"] < 1e-5
    assert row["rate_fraction"] == pytest.approx(row["speedup"] * row["density"])
    for cost in result["host"].values():
        assert cost["more"] == pytest.approx(cost["ours"] - cost["dense"])
    assert ("memory" in result) == (device.type == "cuda")
    pytest.importorskip("matplotlib")
    run("plot", monkeypatch, path)
    assert "| forward + backward, eager, float32 | 16 |" in capsys.readouterr().out
    assert path.with_suffix(".png").exists()


def test_layer_notices_a_wrong_result(monkeypatch):
    layer = load_script(BENCHMARKS / "layer.py")
    ours = layer.BlockSparseLinear(32, 48, block_shape=(16, 16))
    x, dy = torch.randn(5, 32, requires_grad=True), torch.randn(5, 48)
    assert layer._check(ours, x, dy) < 1e-5
    forward = layer.BlockSparseLinear.forward
    monkeypatch.setattr(layer.BlockSparseLinear, "forward", lambda self, x: 1.01 * forward(self, x))
    with pytest.raises(SystemExit, match="wrong result"):
        layer._check(ours, x, dy)


def test_tokens(tmp_path, monkeypatch, device):
    pytest.importorskip("matplotlib")
    path = tmp_path / "tokens.json"
    options = ["--device", device.type, "--shape", 48, 80, "--dtype", "float32", "--block", 16, "--sweep-block", 16]
    run("tokens", monkeypatch, *options, "--tokens", 100, 256, "--seconds", 0.01, "--json", path)
    result = json.loads(path.read_text())
    assert [(row["tokens"], row["rounded_tokens"]) for row in result["sweep"]] == 4 * [(100, 256), (256, 256)]
    assert ("decode" in result) == (device.type == "cuda")
    assert path.with_suffix(".png").exists()


def test_bias_grad(tmp_path, monkeypatch, device):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    path = tmp_path / "bias_grad.json"
    run("bias_grad", monkeypatch, "--seconds", 0.01, "--json", path)
    assert all(row["error"] < 2**-7 for row in json.loads(path.read_text())["rows"])
