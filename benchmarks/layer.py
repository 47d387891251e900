"""Measures BlockSparseLinear as a module against nn.Linear, interleaved: time, memory, and what an eager call costs.

    python benchmarks/layer.py --device cuda --json benchmarks/results/h200_layer.json

Time: forward and backward (gradients of x, weight and bias), eager and under torch.compile. Memory, on a GPU: the peak
of one Adam step on few tokens, so weight, gradient and optimizer state. Host: microseconds of a call on a small layer,
which the GPU does not wait for. ``benchmarks/plot.py`` draws the times.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_block_sparse import BlockSparseLinear
from pytorch_block_sparse.blocks import gather_blocks
from pytorch_block_sparse.cli import environment
from pytorch_block_sparse.cli.measure import interleave
from pytorch_block_sparse.text import table

TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}  # of the largest element
FLUSHES = 10  # 0.6 ms, in which the host enqueues a whole compiled step
SMALL = (8, 64, 64)  # T, I, O of the host's cost
MEMORY_TOKENS = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--shape", type=int, nargs=3, metavar=("T", "I", "O"), default=(8192, 4096, 14336))
    add("--block", type=int, nargs="+", default=[16, 32, 64, 128])
    add("--density", type=float, nargs="+", default=[0.5, 0.25, 0.1])
    add("--compiled", type=float, nargs="*", default=[0.25], help="densities to compile at, too")
    add("--seconds", type=float, default=0.3, help="time for a cell")
    add("--commit", help="what the result says was measured, where the source tree has no .git")
    add("--json", type=Path, help="write everything to this file")
    options = parser.parse_args()
    device, dtype = environment.pick_device(options.device), getattr(torch, options.dtype)
    facts = environment.describe(device, options.commit)
    torch.manual_seed(0)
    result: dict[str, Any] = {"environment": facts, "rows": list(_times(options, device, dtype))}
    if device.type == "cuda":
        result["memory"] = [
            {"block": block, "density": density, **_memory(options.shape, block, density, device, dtype)}
            for block in options.block
            for density in options.density
        ]
    result["host"] = _host(device, dtype)
    print(render(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _times(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Rows as those of the benchmark command."""
    tokens, in_features, out_features = options.shape
    x = torch.randn(tokens, in_features, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(tokens, out_features, device=device, dtype=dtype)
    dense = nn.Linear(in_features, out_features, device=device, dtype=dtype)
    dense_compiled = torch.compile(dense)
    for block in options.block:
        for density in options.density:
            ours = BlockSparseLinear(
                in_features, out_features, density=density, block_shape=(block, block), device=device, dtype=dtype
            )
            error = _check(ours, x, dy)
            for mode in ("eager", "compiled") if density in options.compiled else ("eager",):
                pair = (dense, ours) if mode == "eager" else (dense_compiled, torch.compile(ours))
                steps = {name: _step(module, x, dy) for name, module in zip(("dense", "ours"), pair, strict=True)}
                for step in steps.values():
                    step()  # compiles
                timings = interleave(steps, device=device, seconds=options.seconds, flushes=FLUSHES)
                first, speedup, third = timings.ratios("dense", "ours")
                yield {
                    "operator": f"forward + backward, {mode}",
                    "shape": list(options.shape),
                    "dtype": options.dtype,
                    "density": ours.density,
                    "density_asked": density,
                    "block": block,
                    "dense_ms": timings.median_ms("dense"),
                    "ours_ms": timings.median_ms("ours"),
                    "speedup": speedup,
                    "speedup_quartiles": [first, third],
                    "rate_fraction": speedup * ours.density,
                    "pairs": timings.rounds,
                    "error": error,
                }


def _step(module: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    inputs = [x, *module.parameters()]
    return lambda: torch.autograd.grad(module(x), inputs, dy)


def _check(ours: BlockSparseLinear, x: Tensor, dy: Tensor) -> float:
    """The largest error of output or gradient, relative to its largest element; a wrong result ends the run."""
    dense = ours.to_linear()
    y, expected_y = ours(x), dense(x)
    dx, dw, db = torch.autograd.grad(y, [x, ours.values, ours.bias], dy)
    expected_dx, expected_dw, expected_db = torch.autograd.grad(expected_y, [x, dense.weight, dense.bias], dy)
    pairs = ((y, expected_y), (dx, expected_dx), (dw, gather_blocks(expected_dw, ours.pattern)), (db, expected_db))
    error = max(
        float((found - expected).detach().abs().max() / expected.detach().abs().max()) for found, expected in pairs
    )
    if not error <= TOLERANCE[x.dtype]:
        sys.exit(f"wrong result of {ours}: error {error:.3g} of the largest element")
    return error


def _memory(
    shape: tuple[int, int, int], block: int, density: float, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Peak bytes of an Adam step, of both, and their ratio."""
    _, in_features, out_features = shape
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    makers = {
        "dense": lambda: nn.Linear(in_features, out_features, **options),
        "ours": lambda: BlockSparseLinear(
            in_features, out_features, density=density, block_shape=(block, block), **options
        ),
    }
    x = torch.randn(MEMORY_TOKENS, in_features, **options)
    peaks = {}
    for name, make in makers.items():
        _adam_step(make(), x)  # what libraries allocate once
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        module = make()
        torch.cuda.reset_peak_memory_stats()
        _adam_step(module, x)
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        del module
    return {"dense_bytes": peaks["dense"], "ours_bytes": peaks["ours"], "ratio": peaks["ours"] / peaks["dense"]}


def _adam_step(module: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.Adam(module.parameters())
    module(x).sum().backward()
    optimizer.step()


def _host(device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Microseconds of an eager call, by what is called."""
    tokens, in_features, out_features = SMALL
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    x = torch.randn(tokens, in_features, **options, requires_grad=True)
    dy = torch.randn(tokens, out_features, **options)
    modules = {
        "dense": nn.Linear(in_features, out_features, **options),
        "ours": BlockSparseLinear(in_features, out_features, block_shape=(32, 32), **options),
    }

    def forward(module: nn.Module) -> Callable[[], Tensor]:
        return torch.no_grad()(lambda: module(x))

    kinds = {
        "forward": {name: forward(module) for name, module in modules.items()},
        "forward + backward": {name: _step(module, x, dy) for name, module in modules.items()},
    }
    result = {}
    for kind, calls in kinds.items():
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(20):
            for name, call in calls.items():
                samples[name].append(_microseconds(call, device))
        medians = {name: statistics.median(times[2:]) for name, times in samples.items()}
        result[kind] = {**medians, "more": medians["ours"] - medians["dense"]}
    return result


def _microseconds(call: Callable[[], object], device: torch.device, calls: int = 200) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - begin
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e6 * elapsed / calls


def render(result: dict[str, Any]) -> str:
    """Three tables."""
    times = table(
        ["operator", "block", "density", "dense ms", "ours ms", "speed-up", "quartiles"],
        [
            [
                row["operator"],
                row["block"],
                f"{row['density']:.3g}",
                f"{row['dense_ms']:.3f}",
                f"{row['ours_ms']:.3f}",
                f"{row['speedup']:.2f}x",
                "{:.2f}-{:.2f}".format(*row["speedup_quartiles"]),
            ]
            for row in result["rows"]
        ],
    )
    host = table(
        ["host, µs a call", "dense", "ours", "more"],
        [[kind, *(f"{row[key]:.1f}" for key in ("dense", "ours", "more"))] for kind, row in result["host"].items()],
    )
    memory = table(
        ["memory of an Adam step: block", "density", "MB dense", "MB ours", "ratio"],
        [
            [
                row["block"],
                f"{row['density']:g}",
                f"{row['dense_bytes'] / 1e6:.1f}",
                f"{row['ours_bytes'] / 1e6:.1f}",
                f"{row['ratio']:.3f}",
            ]
            for row in result.get("memory", ())
        ],
    )
    return "\n\n".join((times, host, *([memory] if "memory" in result else [])))


if __name__ == "__main__":
    sys.exit(main())
