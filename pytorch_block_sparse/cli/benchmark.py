"""Measures BlockSparseLinear's three products against the dense ones, call by call in turn, in one process.

    forward      F.linear(x, w)      against  x Wᵀ
    input_grad   dy @ w              against  dy W
    weight_grad  dy.t() @ x          against  dyᵀ x on the stored blocks

Data is random normal, without bias. Packing is part of our time. Every cell is checked first: a wrong result ends the
run with status 1.

    plan           on a GPU: sm90, sm80 or decode (few tokens) kernels on the blocks, or densify (cuBLAS on a dense
                   temporary)
    speed-up       time(dense) / time(ours), the median over pairs
    rate fraction  speed-up x density: the share of dense's own rate that is reached on the stored blocks; 1 is ideal
    ours TF/s      10¹² floating-point operations on the stored blocks a second
    spread         the rate fraction's first to third quartile
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .. import backends, ops
from ..blocks import gather_blocks, scatter_blocks
from ..errors import BlockSparseError
from ..native import block_sparse_native
from ..pattern import BlockPattern
from ..text import progress, table
from . import environment
from .measure import interleave

SUMMARY = "ours against dense"
PEERS = ("bsr", "float32", "blocks", "densify")
FORCED_PLANS = {"blocks": "never", "densify": "always"}  # peers that are ours with the choice of plan taken away
OPERATORS = ("forward", "input_grad", "weight_grad")
# tf32: float32 operands whose products may run in TF32; float32: whose products may not.
DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
DECODE_SHAPE = (1, 4096, 11008)
DEFAULT_SHAPES = {
    "cpu": [(1024, 1024, 4096), (512, 384, 1536)],
    "cuda": [(8192, 4096, 4096), (4096, 4096, 11008)],
}
# Largest error of an element, relative to the largest element of the exact product.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-13}
TF32_TOLERANCE = 2e-3  # operands of 10 bits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``benchmark``."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--shape",
        type=_shape,
        action="append",
        metavar="TxIxO",
        help="tokens x in_features x out_features; repeatable (default on CPU: 1024x1024x4096 and 512x384x1536)",
    )
    add("--decode", action="store_true", help="shape 1x4096x11008, forward only unless --operator says otherwise")
    add("--density", type=_density, action="append", help="repeatable (default: 0.5 0.25 0.1)")
    add("--block", type=_positive, action="append", help="side of a square block; repeatable (default: 16 32 64)")
    add(
        "--dtype",
        choices=DTYPES,
        action="append",
        help="repeatable (default: float32 and bfloat16); tf32, on a GPU, is float32 with products in TF32",
    )
    add("--operator", choices=OPERATORS, action="append", help="repeatable (default: all three)")
    add(
        "--peer",
        choices=PEERS,
        action="append",
        help="time this too; repeatable. bsr: torch's own BSR products. float32: the dense product in float32, which "
        "is faster than dense bfloat16 on a CPU without bfloat16 instructions. blocks, densify: ours on a GPU by that "
        "plan, whichever it would choose",
    )
    add("--seconds", type=_seconds, default=1.0, help="time for a cell (default: 1); 3 pairs at least")
    add("--repeats", type=_repeats, help="pairs for a cell, instead of --seconds")
    add("--seed", type=int, default=0, help="of data and patterns (default: 0)")
    add("--threads", type=_positive, help="CPU threads of dense and ours (default: PyTorch's choice)")
    add("--commit", help="what the result says was measured, where the source tree has no .git (default: from git)")
    add("--json", type=Path, metavar="FILE", help="write environment and rows to this file")


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark, prints its table and writes its file."""
    device = environment.pick_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.json and not options.json.parent.is_dir():
        raise BlockSparseError(f"argument --json: the folder {options.json.parent} does not exist")
    if device.type == "cpu" and "tf32" in (options.dtype or ()):
        raise BlockSparseError("argument --dtype: tf32 needs --device cuda")
    if device.type == "cpu" and (forced := FORCED_PLANS.keys() & (options.peer or ())):
        raise BlockSparseError(f"argument --peer: {min(forced)} needs --device cuda")
    facts = environment.describe(device, options.commit)
    facts["arguments"] = {"seconds": options.seconds, "repeats": options.repeats, "seed": options.seed}
    cells = list(_cells(options))
    rows: list[dict[str, Any]] = []
    make = _Data(device, options.seed)
    with progress(len(cells), unit="cell", leave=False, disable=None) as bar:
        for cell in cells:
            bar.set_description(str(cell))
            try:
                with _float32_precision(cell):
                    rows.append(measure_cell(cell, make, options.seconds, options.repeats, options.peer or ()))
            except WrongResult as error:
                print(f"wrong result: {error}", file=sys.stderr)
                return 1
            bar.update()
    print(render(facts, rows))
    if options.json:
        options.json.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
    return 0


@contextlib.contextmanager
def _float32_precision(cell: Cell) -> Iterator[None]:
    """What float32 products may run in while the cell is measured."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if cell.dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class WrongResult(Exception):
    """A product differs from the dense one by more than rounding."""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    shape: tuple[int, int, int]  # T, I, O
    dtype: str
    density: float
    block: int
    operator: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.operator} {shape} {self.dtype} block {self.block} density {self.density:g}"


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    shapes = options.shape or ([] if options.decode else DEFAULT_SHAPES[options.device])
    operators = options.operator or (["forward"] if options.decode and not options.shape else OPERATORS)
    for shape in [*shapes, *([DECODE_SHAPE] if options.decode else [])]:
        for dtype in options.dtype or ("float32", "bfloat16"):
            for density in options.density or (0.5, 0.25, 0.1):
                for block in options.block or (16, 32, 64):
                    for operator in operators:
                        yield Cell(shape, dtype, density, block, operator)


class _Data:
    """Operands and patterns, made once for the cells in a row that share them."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        self._dense_key: object = None
        self._sparse_key: object = None

    def dense(self, cell: Cell) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, I], w [O, I] and dy [T, O]."""
        key = (cell.shape, cell.dtype)
        if key != self._dense_key:
            tokens, in_features, out_features = cell.shape
            generator = torch.Generator(self.device).manual_seed(self.seed)
            sizes = ((tokens, in_features), (out_features, in_features), (tokens, out_features))
            self._dense = tuple(
                torch.randn(size, generator=generator, device=self.device).to(DTYPES[cell.dtype]) for size in sizes
            )
            self._dense_key = key
        return self._dense

    def sparse(self, cell: Cell) -> tuple[BlockPattern, Tensor]:
        """The pattern, and the values [nnz, bh, bw] of w on it."""
        key = (cell.shape, cell.dtype, cell.density, cell.block)
        if key != self._sparse_key:
            _, in_features, out_features = cell.shape
            generator = torch.Generator().manual_seed(self.seed)
            block_shape = (cell.block, cell.block)
            pattern = BlockPattern.random((out_features, in_features), cell.density, block_shape, generator=generator)
            self._sparse = pattern, gather_blocks(self.dense(cell)[1], pattern)
            self._sparse_key = key
        return self._sparse


def measure_cell(
    cell: Cell, make: _Data, seconds: float, repeats: int | None, peers: tuple[str, ...] | list[str] = ()
) -> dict[str, Any]:
    """Checks and times one cell.

    Returns:
        A row of the result file. ``peers`` holds each peer's median time and speed-up over dense, or why it has none.

    Raises:
        WrongResult: ours is not the dense product on the stored blocks.
    """
    x, w, dy = make.dense(cell)
    pattern, values = make.sparse(cell)
    with torch.no_grad():
        functions = {"dense": _dense(cell, x, w, dy), "ours": _ours(cell, x, dy, values, pattern)}
        exact = _exact(cell, x, dy, values, pattern)
        error = _check(cell, functions["ours"](), exact)
        plan = block_sparse_native.last_plan() if x.is_cuda else None
        for peer, mode in FORCED_PLANS.items():
            if peer in peers:
                functions[peer] = backends.densify_plan(mode)(functions["ours"])
                _check(cell, functions[peer](), exact, peer)
        unavailable: dict[str, str] = {}
        if "float32" in peers:
            functions["float32"] = _dense(cell, x.float(), w.float(), dy.float())
        if "bsr" in peers:
            try:
                functions["bsr"] = _bsr(cell, x, dy, values, pattern)
                _check(cell, functions["bsr"](), exact, "bsr")
            except Exception as reason:  # Triton's errors have no base of their own
                functions.pop("bsr", None)
                unavailable["bsr"] = f"{type(reason).__name__}: {reason}".splitlines()[0]
        del exact
        timings = interleave(functions, device=make.device, seconds=seconds, repeats=repeats)
    first, speedup, third = timings.ratios("dense", "ours")
    row = {
        "operator": cell.operator,
        "shape": list(cell.shape),
        "dtype": cell.dtype,
        "density": pattern.density,
        "density_asked": cell.density,
        "block": cell.block,
        "dense_ms": timings.median_ms("dense"),
        "ours_ms": timings.median_ms("ours"),
        "ours_tflops": 2e-9 * x.shape[0] * values.numel() / timings.median_ms("ours"),
        "speedup": speedup,
        "rate_fraction": speedup * pattern.density,
        "rate_fraction_quartiles": [first * pattern.density, third * pattern.density],
        "pairs": timings.rounds,
        "error": error,
        "plan": plan,
    }
    if peers:
        row["peers"] = {
            peer: {"unavailable": unavailable[peer]}
            if peer in unavailable
            else {"ms": timings.median_ms(peer), "speedup": timings.ratios("dense", peer)[1]}
            for peer in peers
        }
    return row


def _dense(cell: Cell, x: Tensor, w: Tensor, dy: Tensor) -> Callable[[], Tensor]:
    if cell.operator == "forward":
        return lambda: linear(x, w)
    return (lambda: dy @ w) if cell.operator == "input_grad" else lambda: dy.t() @ x


def _ours(cell: Cell, x: Tensor, dy: Tensor, values: Tensor, pattern: BlockPattern) -> Callable[[], Tensor]:
    if cell.operator == "forward":
        return lambda: ops.linear(x, values, pattern)
    if cell.operator == "input_grad":
        return lambda: ops.input_grad(dy, values, pattern)
    return lambda: ops.weight_grad(dy, x, pattern)


def _exact(cell: Cell, x: Tensor, dy: Tensor, values: Tensor, pattern: BlockPattern) -> Tensor:
    """The product in float64 from the dense matrix of the stored blocks."""
    if cell.operator == "weight_grad":
        return gather_blocks(dy.double().t() @ x.double(), pattern)
    w = scatter_blocks(values, pattern).double()
    return x.double() @ w.t() if cell.operator == "forward" else dy.double() @ w


def _check(cell: Cell, found: Tensor, exact: Tensor, who: str = "ours") -> float:
    """The largest error of an element relative to the largest element; an error if it is no mere rounding."""
    error = float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-300))
    tolerance = TOLERANCES[found.dtype]
    if found.is_cuda and found.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        tolerance = TF32_TOLERANCE
    if not error <= tolerance:  # true for NaN too
        raise WrongResult(
            f"{who}, {cell}: error {error:.3g} of the largest element, at most {tolerance:.3g} is rounding"
        )
    return error


def _bsr(cell: Cell, x: Tensor, dy: Tensor, values: Tensor, pattern: BlockPattern) -> Callable[[], Tensor]:
    """The same product with a ``torch.sparse_bsr`` weight."""
    w = scatter_blocks(values, pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BSR is in beta, PyTorch says once
        if cell.operator == "weight_grad":
            support = w.to_sparse_bsr(pattern.block_shape)
            return lambda: _sampled_addmm()(support, dy.t(), x, beta=0).values()
        if cell.operator == "forward":
            weight = w.to_sparse_bsr(pattern.block_shape)
            return lambda: linear(x, weight)
        transposed = w.t().to_sparse_bsr(pattern.block_shape)
        return lambda: linear(dy, transposed)


def _sampled_addmm() -> Callable[..., Tensor]:
    """torch's dense x dense product on a BSR support; internal, and there only with Triton."""
    from torch.sparse import _triton_ops

    if (function := getattr(_triton_ops, "sampled_addmm", None)) is None:
        raise BlockSparseError("torch's dense x dense product on a BSR support needs Triton")
    return function


def render(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The table, under a line that says where it was measured."""
    peers = sorted({peer for row in rows for peer in row.get("peers", {})})
    header = ["operator", "T x I x O", "dtype", "block", "density", "dense ms", "ours ms", "ours TF/s"]
    plans = ["plan"] if facts["device"] == "cuda" else []
    header += ["speed-up", "rate fraction", "spread", "pairs", *plans, *(f"{peer} speed-up" for peer in peers)]
    lines = []
    for row in rows:
        low, high = row["rate_fraction_quartiles"]
        lines.append(
            [
                row["operator"],
                "x".join(map(str, row["shape"])),
                row["dtype"],
                row["block"],
                f"{row['density']:.3g}",
                f"{row['dense_ms']:.3f}",
                f"{row['ours_ms']:.3f}",
                f"{row['ours_tflops']:.3g}",
                f"{row['speedup']:.2f}x",
                f"{row['rate_fraction']:.2f}",
                f"{low:.2f}-{high:.2f}",
                row["pairs"],
                *(row[name] for name in plans),
                *(_peer_text(row["peers"][peer]) for peer in peers),
            ]
        )
    where = facts["gpu"] if facts["device"] == "cuda" else f"{facts['cpu']}, {facts['capability']} kernels"
    if facts["device"] == "cuda":
        where += f", {facts['cuda_path']} path"
    title = f"{where}, {facts['threads']} threads, torch {facts['torch']}, commit {facts['commit'] or 'unknown'}"
    if facts["load_average"]:
        title += f"\nload average before the run: {facts['load_average']} (other work on these cores blurs the ratios)"
    reasons: dict[str, str] = {}  # why a peer is n/a, and the first cell where it is
    for row in rows:
        for peer, result in row.get("peers", {}).items():
            if "unavailable" in result:
                cell = f"{row['operator']} {row['dtype']} block {row['block']}"
                reasons.setdefault(f"{peer} n/a: {result['unavailable']}", cell)
    notes = "".join(f"\n{reason} (first at {cell})" for reason, cell in reasons.items())
    return f"{title}\n\n{table(header, lines, left=3)}{notes}"


def _peer_text(result: dict[str, Any]) -> str:
    return "n/a" if "unavailable" in result else f"{result['speedup']:.2f}x"


def _shape(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be TxIxO, three positive integers such as 512x384x1536, got {text!r}")
    tokens, in_features, out_features = map(int, text.split("x"))
    return tokens, in_features, out_features


def _number(text: str, kind: type, rule: str, allowed: Callable[[Any], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not allowed(value):
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return value


def _density(text: str) -> float:
    return _number(text, float, "a number in (0, 1]", lambda value: 0 < value <= 1)


def _positive(text: str) -> int:
    return _number(text, int, "a positive integer", lambda value: value >= 1)


def _repeats(text: str) -> int:
    return _number(text, int, "an integer of at least 2", lambda value: value >= 2)


def _seconds(text: str) -> float:
    return _number(text, float, "a positive number", lambda value: 0 < value < 1e6)
