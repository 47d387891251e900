"""Time against the number of tokens: no cliff between round numbers, and the few tokens of decoding. With a plot.

    python benchmarks/tokens.py --device cuda --json benchmarks/results/h200_tokens.json

Sweep: each T is timed in turn with T rounded up to a multiple of 256, which has at least as much work; *over* is the
ratio of the two times. Decoding, on a GPU: forward passes in a CUDA graph over weights that together are several times
the L2 cache, dense and ours in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from pytorch_block_sparse import BlockPattern, ops
from pytorch_block_sparse.cli import environment
from pytorch_block_sparse.cli.measure import interleave, interleave_graphs, rotating_copies
from pytorch_block_sparse.plotting import new_figure
from pytorch_block_sparse.text import table

STEP = 256  # tokens
SWEEP = (100, 129, 200, 257, 300, 385, 500, 513, 700, 1000, 1025, 1300, 1537, 2049, 3000, 4097, 5000, 8193)
SWEEP += (10_000, 16_385, 30_000, 65_537, 100_000, 131_073, 300_001, 1_000_000)
DECODE_TOKENS = (1, 16, 64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--shape", type=int, nargs=2, metavar=("I", "O"), default=(4096, 14336))
    add("--block", type=int, nargs="+", default=[16, 32, 64, 128], help="of the decoding")
    add("--sweep-block", type=int, nargs="+", default=[64], help="of the sweep")
    add("--density", type=float, default=0.25)
    add("--tokens", type=int, nargs="+", default=list(SWEEP), help="of the sweep")
    add("--seconds", type=float, default=0.1, help="time for a cell")
    add("--commit", help="what the result says was measured, where the source tree has no .git")
    add("--json", type=Path, help="write everything to this file, and the plot beside it")
    options = parser.parse_args()
    device = environment.pick_device(options.device)
    facts = environment.describe(device, options.commit)
    torch.manual_seed(0)
    with torch.no_grad():
        result: dict[str, Any] = {"environment": facts, "sweep": list(_sweep(options, device))}
        if device.type == "cuda":
            result["decode"] = list(_decode(options, device))
    print(render(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        draw(result, options.json.with_suffix(".png"))
    return 0


def _sweep(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    (in_features, out_features), dtype = options.shape, getattr(torch, options.dtype)
    most = math.ceil(max(options.tokens) / STEP) * STEP
    x = torch.empty(most, in_features, device=device, dtype=dtype).normal_()
    dy = torch.empty(most, out_features, device=device, dtype=dtype).normal_()
    for block in options.sweep_block:
        pattern = BlockPattern.random((out_features, in_features), options.density, (block, block))
        values = torch.randn(pattern.nnz, block, block, device=device).to(dtype)
        for operator in ("forward", "input_grad", "weight_grad", "bias_grad"):
            for tokens in options.tokens:
                rounded = math.ceil(tokens / STEP) * STEP
                calls = {
                    name: _call(operator, x[:count], dy[:count], values, pattern)
                    for name, count in (("exact", tokens), ("rounded", rounded))
                }
                timings = interleave(calls, device=device, seconds=options.seconds)
                yield {
                    "operator": operator,
                    "block": block,
                    "tokens": tokens,
                    "ms": timings.median_ms("exact"),
                    "rounded_tokens": rounded,
                    "rounded_ms": timings.median_ms("rounded"),
                    "over": timings.ratios("exact", "rounded")[1],
                }


def _call(operator: str, x: Tensor, dy: Tensor, values: Tensor, pattern: BlockPattern) -> Callable[[], Tensor]:
    if operator == "forward":
        return lambda: ops.linear(x, values, pattern)
    if operator == "input_grad":
        return lambda: ops.input_grad(dy, values, pattern)
    if operator == "weight_grad":
        return lambda: ops.weight_grad(dy, x, pattern)
    return lambda: ops.bias_grad(dy)


def _decode(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    (in_features, out_features), dtype = options.shape, getattr(torch, options.dtype)

    dense = rotating_copies(torch.randn(out_features, in_features, device=device).to(dtype))
    for block in options.block:
        pattern = BlockPattern.random((out_features, in_features), options.density, (block, block))
        values = rotating_copies(torch.randn(pattern.nnz, block, block, device=device).to(dtype))
        for tokens in DECODE_TOKENS:
            x = torch.randn(tokens, in_features, device=device).to(dtype)
            calls = {
                "dense": [lambda w=w, x=x: linear(x, w) for w in dense],
                "ours": [lambda v=v, x=x, p=pattern: ops.linear(x, v, p) for v in values],
            }
            timings = interleave_graphs(calls, seconds=options.seconds)
            yield {
                "block": block,
                "density": pattern.density,
                "tokens": tokens,
                "dense_us": 1e3 * timings.median_ms("dense"),
                "ours_us": 1e3 * timings.median_ms("ours"),
                "speedup": timings.ratios("dense", "ours")[1],
            }


def render(result: dict[str, Any]) -> str:
    """A table of the sweep, and one of the decoding."""
    sweep = table(
        ["operator", "block", "T", "ms", "rounded up", "ms", "over"],
        [
            [
                row["operator"],
                row["block"],
                row["tokens"],
                f"{row['ms']:.4f}",
                row["rounded_tokens"],
                f"{row['rounded_ms']:.4f}",
                f"{row['over']:.3f}",
            ]
            for row in result["sweep"]
        ],
    )
    decode = table(
        ["decoding: block", "T", "dense µs", "ours µs", "speed-up"],
        [
            [row["block"], row["tokens"], f"{row['dense_us']:.1f}", f"{row['ours_us']:.1f}", f"{row['speedup']:.2f}x"]
            for row in result.get("decode", ())
        ],
    )
    return "\n\n".join((sweep, *([decode] if "decode" in result else [])))


def draw(result: dict[str, Any], output: Path) -> None:
    """Time of a token against T, and the ratio of T's time to that of T rounded up, of every operator."""
    figure = new_figure(figsize=(7, 7))
    times, ratios = figure.subplots(2, 1, sharex=True)
    for operator, block in dict.fromkeys((row["operator"], row["block"]) for row in result["sweep"]):
        rows = [row for row in result["sweep"] if (row["operator"], row["block"]) == (operator, block)]
        tokens = [row["tokens"] for row in rows]
        each = [1e6 * row["ms"] / row["tokens"] for row in rows]
        times.plot(tokens, each, marker=".", label=f"{operator}, {block}x{block} blocks")
        ratios.plot(tokens, [row["over"] for row in rows], marker=".")
    times.set_yscale("log")
    times.set_ylabel("ns a token")
    times.legend(fontsize=8)
    ratios.axhline(1.1, color="black", linewidth=1, linestyle="--")
    ratios.set_ylabel(f"over the time of T rounded up to {STEP}")
    ratios.set_xscale("log")
    ratios.set_xlabel("tokens")
    for axis in (times, ratios):
        axis.grid(alpha=0.3)
    facts = result["environment"]
    figure.suptitle(f"{facts.get('gpu') or facts['cpu']}, torch {facts['torch']}", fontsize=10)
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
