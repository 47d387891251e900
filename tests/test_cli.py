"""The command line, run in this process: what it prints, what it writes, and how it refuses."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from pytorch_block_sparse import cli
from pytorch_block_sparse.cli import benchmark
from pytorch_block_sparse.cli.measure import interleave

ROOT = Path(__file__).parents[1]
TINY = ["--shape", "24x48x80", "--repeats", "3", "--block", "16", "--density", "0.5"]


def refusal(capsys, *arguments):
    """The error line of a command that must exit with 2."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_info_is_readable_and_parses(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "CPU back end" in text and "CUDA back end" in text
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cpu"]["capability"] in ("avx512_bf16", "avx512", "avx2", "portable")
    assert facts["cpu"]["threads_requested"] == torch.get_num_threads()
    assert facts["cpu"]["threads_running"] >= 1
    assert {plan["dtype"] for plan in facts["plans"]["cpu"]} == {"float32", "bfloat16", "float16", "float64"}
    if torch.version.cuda is None:
        assert facts["cuda"]["built"] is False and "CPU build" in facts["cuda"]["missing"]


def test_benchmark_writes_environment_and_rows(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert cli.main(["benchmark", *TINY, "--peer", "bsr", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert {"torch", "cpu", "threads", "capability", "device", "date", "commit"} <= result["environment"].keys()
    rows = result["rows"]
    assert [(row["dtype"], row["operator"]) for row in rows] == [
        (dtype, operator) for dtype in ("float32", "bfloat16") for operator in benchmark.OPERATORS
    ]
    for row in rows:
        assert row["shape"] == [24, 48, 80] and row["block"] == 16 and row["pairs"] == 3
        assert row["density"] == round(0.5 * 15) / 15 and row["density_asked"] == 0.5
        assert row["dense_ms"] > 0 and row["ours_ms"] > 0 and row["plan"] is None
        assert row["rate_fraction"] == pytest.approx(row["speedup"] * row["density"])
        low, high = row["rate_fraction_quartiles"]
        assert 0 < low <= row["rate_fraction"] <= high
        assert row["operator"] in printed
        assert row["ours_tflops"] == pytest.approx(2e-9 * 24 * 8 * 16 * 16 / row["ours_ms"])
    reason = next(row for row in rows if row["operator"] == "weight_grad")["peers"]["bsr"]["unavailable"]
    assert f"bsr n/a: {reason} (first at weight_grad float32 block 16)" in printed


def test_benchmark_names_the_commit_it_is_given(tmp_path, capsys):
    path = tmp_path / "result.json"
    few = ["--operator", "forward", "--dtype", "float32"]
    assert cli.main(["benchmark", *TINY, *few, "--commit", "0123abc", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["environment"]["commit"] == "0123abc"
    assert "commit 0123abc" in capsys.readouterr().out


def test_benchmark_decode_is_one_token_forward():
    parser = cli.build_parser()
    cells = list(benchmark._cells(parser.parse_args(["benchmark", "--decode", "--dtype", "float32", "--block", "32"])))
    assert {(cell.shape, cell.operator) for cell in cells} == {((1, 4096, 11008), "forward")}


@pytest.mark.parametrize("damage", [1.01, float("nan")])
def test_benchmark_stops_at_a_wrong_result(monkeypatch, capsys, tmp_path, damage):
    right = benchmark.ops.linear
    monkeypatch.setattr(benchmark.ops, "linear", lambda *operands: right(*operands) * damage)
    assert cli.main(["benchmark", *TINY, "--json", str(tmp_path / "result.json")]) == 1
    assert "wrong result: ours, forward 24x48x80 float32" in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


def test_benchmark_runs_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert cli.main(["benchmark", *TINY, "--operator", "forward", "--dtype", "float32"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "12x34"], "argument --shape: must be TxIxO"),
        (["--shape", "0x16x16"], "argument --shape: must be TxIxO"),
        (["--density", "1.5"], "argument --density: must be a number in (0, 1], got '1.5'"),
        (["--density", "nan"], "argument --density: must be a number in (0, 1], got 'nan'"),
        (["--block", "0"], "argument --block: must be a positive integer, got '0'"),
        (["--repeats", "1"], "argument --repeats: must be an integer of at least 2, got '1'"),
        (["--seconds", "-1"], "argument --seconds: must be a positive number, got '-1'"),
        (["--threads", "two"], "argument --threads: must be a positive integer, got 'two'"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--dtype", "tf32"], "argument --dtype: tf32 needs --device cuda"),
        (["--peer", "densify"], "argument --peer: densify needs --device cuda"),
        (["--peer", "dense"], "argument --peer: invalid choice: 'dense'"),
        (["--json", "no/such/folder/result.json"], "argument --json: the folder no/such/folder does not exist"),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) else "",
)
def test_benchmark_refuses(arguments, message, capsys):
    assert message in refusal(capsys, "benchmark", *arguments)


@pytest.mark.skipif(torch.version.cuda is not None, reason="speaks of a CPU build of PyTorch")
def test_benchmark_says_why_there_is_no_cuda(capsys):
    line = refusal(capsys, "benchmark", "--device", "cuda")
    assert "argument --device: cuda is not available: this PyTorch is a CPU build" in line


def test_a_command_is_required(capsys):
    assert "COMMAND" in refusal(capsys)
    assert "invalid choice: 'tuna'" in refusal(capsys, "tuna")


def test_interleave_takes_turns():
    calls = []
    timings = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=4)
    assert "".join(calls) == "ab" * 5  # the first pair warms up
    assert timings.rounds == 4 and all(seconds >= 0 for seconds in timings.seconds["b"])


def test_plot_draws_a_result(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("benchmarks_plot", ROOT / "benchmarks" / "plot.py")
    plot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plot)
    path = tmp_path / "result.json"
    cli.main(["benchmark", *TINY, "--density", "0.25", "--dtype", "float32", "--json", str(path)])
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["plot.py", str(path)])
    plot.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| | block | density 0.5 | density 0.25 |" and len(lines) == 2 + 3
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("sys.argv", ["plot.py", str(tmp_path / "missing.json")])
    with pytest.raises(SystemExit):
        plot.main()
    assert "argument result:" in capsys.readouterr().err
