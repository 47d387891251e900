"""Measures the bias gradient against torch's sum and against reading dy once, in CUDA graphs. Needs a GPU.

python benchmarks/bias_grad.py --json benchmarks/results/h200_bias_grad.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from pytorch_block_sparse import ops
from pytorch_block_sparse.cli import environment
from pytorch_block_sparse.cli.measure import interleave_graphs, rotating_copies
from pytorch_block_sparse.text import table

SHAPES = ((1, 14336), (16, 14336), (64, 14336), (256, 14336), (1024, 14336), (8192, 14336), (100_000, 14336))
SHAPES += ((256, 4096), (2048, 4096), (16384, 4096), (16384, 1024), (8192, 14337))
MOST_COPIES = 200  # of dy, which take turns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--bandwidth", type=float, default=4.3, help="TB/s of a copy on this GPU (default: an H200's)")
    add("--seconds", type=float, default=0.1, help="time for a cell")
    add("--commit", help="what the result says was measured, where the source tree has no .git")
    add("--json", type=Path, help="write everything to this file")
    options = parser.parse_args()
    device = environment.pick_device("cuda")
    facts = environment.describe(device, options.commit)
    rows = [measure(shape, getattr(torch, options.dtype), options, device) for shape in SHAPES]
    keys = ("ours_us", "torch_us", "read_us")
    print(
        table(
            ["T x O", "ours µs", "torch µs", "reading µs", "ours / reading", "speed-up"],
            [
                [
                    "x".join(map(str, row["shape"])),
                    *(f"{row[key]:.1f}" for key in keys),
                    f"{row['over_reading']:.2f}",
                    f"{row['speedup']:.2f}x",
                ]
                for row in rows
            ],
        )
    )
    if options.json:
        options.json.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
    return 0


def measure(
    shape: tuple[int, int], dtype: torch.dtype, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """One row; a wrong result ends the run."""
    first = torch.randn(shape, device=device).to(dtype)
    size = first.numel() * first.itemsize
    copies = rotating_copies(first, MOST_COPIES)
    exact = first.double().sum(0)
    error = float((ops.bias_grad(first).double() - exact).abs().max() / exact.abs().max())
    if not error <= torch.finfo(dtype).eps:
        sys.exit(f"wrong result at {shape}: error {error:.3g} of the largest element")
    calls = {
        "ours": [lambda dy=dy: ops.bias_grad(dy) for dy in copies],
        "torch": [lambda dy=dy: dy.sum(0) for dy in copies],
    }
    timings = interleave_graphs(calls, seconds=options.seconds)
    ours, read = 1e3 * timings.median_ms("ours"), size / options.bandwidth * 1e-6
    return {
        "shape": list(shape),
        "dtype": options.dtype,
        "ours_us": ours,
        "torch_us": 1e3 * timings.median_ms("torch"),
        "read_us": read,
        "over_reading": ours / read,
        "speedup": timings.ratios("torch", "ours")[1],
        "rounds": timings.rounds,
        "error": error,
    }


if __name__ == "__main__":
    sys.exit(main())
