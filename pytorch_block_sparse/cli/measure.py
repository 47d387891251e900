"""Time of several functions, interleaved call by call in one process: the one timer of the package.

What else runs on the machine, the clock rate and the temperature change with time; two functions that take turns see
the same of them, so the ratio of a pair is steadier than either time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

MIN_ROUNDS = 3
_FLUSH_BYTES = 256 << 20
_ROTATED_BYTES = 240 << 20


@dataclass(frozen=True)
class Timings:
    """Seconds of every call, by function: element i of each list is of round i."""

    seconds: Mapping[str, list[float]]

    @property
    def rounds(self) -> int:
        """How often each function was timed."""
        return len(next(iter(self.seconds.values())))

    def median_ms(self, name: str) -> float:
        """Median time of a call in milliseconds."""
        return 1e3 * statistics.median(self.seconds[name])

    def ratios(self, over: str, under: str) -> tuple[float, float, float]:
        """First quartile, median and third quartile of time(over) / time(under) over the rounds."""
        pairs = zip(self.seconds[over], self.seconds[under], strict=True)
        first, median, third = statistics.quantiles([a / b for a, b in pairs], n=4, method="inclusive")
        return first, median, third


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str = "cpu",
    seconds: float = 1.0,
    repeats: int | None = None,
    flushes: int = 1,
) -> Timings:
    """Times functions in turn: a, b, a, b, ...

    One round warms up and is thrown away, unless it alone took more than ``seconds``. On CUDA, events are read, and the
    L2 cache is flushed before every call.

    Args:
        functions: what to time, by name; at least one.
        device: where they run.
        seconds: stop after this time, and after 3 rounds at least.
        repeats: this many rounds instead, whatever they take; at least 2.
        flushes: how often the L2 cache is flushed before a call. Each takes some 60 µs, in which the host runs ahead:
            functions of many kernels need more of them, else what is timed is the host.
    """
    timer = _cuda_timer(torch.device(device), flushes) if torch.device(device).type == "cuda" else _cpu_timer
    samples: dict[str, list[float]] = {name: [] for name in functions}

    def one_round() -> None:
        for name, function in functions.items():
            samples[name].append(timer(function))

    begin = time.perf_counter()
    one_round()
    if time.perf_counter() - begin <= seconds:
        for times in samples.values():
            times.clear()
        begin = time.perf_counter()
    return _run_rounds(one_round, Timings(samples), begin, seconds, repeats)


def interleave_graphs(sequences: Mapping[str, Sequence[Callable[[], object]]], *, seconds: float = 0.2) -> Timings:
    """Times calls within CUDA graphs, replayed in turn: no host is in the way, so a few microseconds can be told apart.

    Args:
        sequences: by name, calls of the same work on different data, together several times the L2 cache: so each finds
            its data in memory.
        seconds: stop after this time, and after 3 rounds at least.

    Returns:
        Seconds of one call: those of a replay, over the calls in it.
    """
    graphs = {}
    for name, calls in sequences.items():
        calls[0]()  # what is set up at the first call must not be captured
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in calls:
                call()
    samples: dict[str, list[float]] = {name: [] for name in sequences}

    def one_round() -> None:
        for name, graph in graphs.items():
            samples[name].append(_cuda_seconds(graph.replay) / len(sequences[name]))

    one_round()
    for times in samples.values():
        times.clear()
    return _run_rounds(one_round, Timings(samples), time.perf_counter(), seconds)


def rotating_copies(tensor: torch.Tensor, most: int | None = None) -> list[torch.Tensor]:
    """Copies for :func:`interleave_graphs`: two at least, together several times the L2 cache, ``most`` at most."""
    count = max(2, math.ceil(_ROTATED_BYTES / (tensor.numel() * tensor.itemsize)))
    return [tensor.clone() for _ in range(min(count, most or count))]


def _run_rounds(
    one_round: Callable[[], None], timings: Timings, begin: float, seconds: float, repeats: int | None = None
) -> Timings:
    """Rounds until ``seconds`` after ``begin``, 3 at least; or ``repeats`` of them."""
    while timings.rounds < (repeats or MIN_ROUNDS) or (repeats is None and time.perf_counter() - begin < seconds):
        one_round()
    return timings


def _cpu_timer(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _cuda_timer(device: torch.device, flushes: int) -> Callable[[Callable[[], object]], float]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)  # several times the L2 cache of any GPU

    def timer(function: Callable[[], object]) -> float:
        # Filling takes longer than launching a kernel, so the host's work hides behind it.
        for _ in range(flushes):
            flush.zero_()
        return _cuda_seconds(function)

    return timer


def _cuda_seconds(function: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
