"""Allocation: how many blocks each layer keeps of a budget that all of them share."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import BlockSparseError
from ..pattern import blocks_at_density
from .layers import TargetLayer

ALLOCATIONS = ("uniform", "global", "erdos_renyi_kernel", "error")
# Where "error" measures a layer's output error; between two of them it is interpolated.
ERROR_DENSITIES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)


def check_allocation(allocation: str) -> str:
    """One of ``ALLOCATIONS``, or an error; "erk" is short for the third."""
    name = "erdos_renyi_kernel" if allocation == "erk" else allocation
    if name not in ALLOCATIONS:
        raise BlockSparseError(f"allocation must be one of {', '.join(ALLOCATIONS)} or 'erk', got {allocation!r}")
    return name


def uniform(targets: Sequence[TargetLayer]) -> dict[str, int]:
    """Every layer its own density: round(density * R * C) blocks, at least one."""
    return {target.name: blocks_at_density(target.density, target.cells) for target in targets}


def by_global_score(targets: Sequence[TargetLayer], scores: Mapping[str, Tensor]) -> dict[str, int]:
    """The highest scores of all layers together, until the elements that uniform densities keep are used up.

    A layer keeps at least one block. Scores of layers with other block shapes are compared as they are.

    Source: global magnitude pruning, Han et al., 2015, arXiv:1506.02626; compared with uniform in Blalock et al., "What
    is the State of Neural Network Pruning?", 2020, arXiv:2003.03033.

    Args:
        targets: the layers that share the budget.
        scores: [R, C] of each.
    """
    order = torch.cat([scores[target.name].flatten().sort(descending=True)[0][1:] for target in targets])
    owner = torch.cat([torch.full((target.cells - 1,), place) for place, target in enumerate(targets)])
    counts = [1] * len(targets)
    left = _budget(targets) - sum(_elements(target) for target in targets)
    for place in owner[order.argsort(descending=True, stable=True)].tolist():
        size = _elements(targets[place])
        if size <= left:
            counts[place] += 1
            left -= size
    return {target.name: count for target, count in zip(targets, counts, strict=True)}


def erdos_renyi_kernel(targets: Sequence[TargetLayer]) -> dict[str, int]:
    """Densities in proportion to (O + I) / (O * I), so that small layers stay denser; the total as if uniform.

    A layer that would pass density 1 is kept whole, and the others share the rest.

    Source: Evci et al., "Rigging the Lottery", 2020, arXiv:1911.11134, after Mocanu et al., 2018, arXiv:1707.04780. For
    linear layers, which have no kernel, the two agree.
    """
    raw = {t.name: sum(t.shape) / (t.shape[0] * t.shape[1]) for t in targets}
    whole: set[str] = set()
    while True:
        open_layers = [target for target in targets if target.name not in whole]
        budget = _budget(targets) - sum(t.cells * _elements(t) for t in targets if t.name in whole)
        scale = budget / max(sum(raw[t.name] * t.cells * _elements(t) for t in open_layers), 1e-30)
        full = {t.name for t in open_layers if scale * raw[t.name] >= 1}
        if not full:
            break
        whole |= full
    return {
        t.name: t.cells if t.name in whole else min(t.cells, max(1, round(scale * raw[t.name] * t.cells)))
        for t in targets
    }


def by_output_error(targets: Sequence[TargetLayer], error_at: Callable[[TargetLayer, int], float]) -> dict[str, int]:
    """The counts that make the sum over layers of the squared relative output error smallest, under the budget.

    Each layer's error is measured at a few densities and made convex; then the budget goes, piece by piece, to where
    an element lowers the sum most, which is optimal for convex curves (Fox, "Discrete Optimization via Marginal
    Analysis", 1966). The measurement follows layer-wise reconstruction error as a sensitivity: Frantar & Alistarh,
    "Optimal Brain Compression", 2022, arXiv:2208.11580, section 5.

    Args:
        targets: the layers that share the budget.
        error_at: (layer, blocks) -> the relative output error with that many of its best blocks.
    """
    pieces: list[tuple[float, int, int, int]] = []  # (-gain an element, layer, from, to)
    counts = []
    for place, target in enumerate(targets):
        stops = sorted({1, *(blocks_at_density(density, target.cells) for density in ERROR_DENSITIES)})
        curve = _convex([(count, error_at(target, count) ** 2) for count in stops])
        counts.append(curve[0][0])
        for (low, before), (high, after) in itertools.pairwise(curve):
            heapq.heappush(pieces, (-(before - after) / ((high - low) * _elements(target)), place, low, high))
    left = _budget(targets) - sum(_elements(target) * count for target, count in zip(targets, counts, strict=True))
    while pieces:
        _, place, low, high = heapq.heappop(pieces)
        taken = min(high - low, left // _elements(targets[place]))
        counts[place] += taken
        left -= taken * _elements(targets[place])
        if taken < high - low:
            break
    return {target.name: count for target, count in zip(targets, counts, strict=True)}


def _convex(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The lower convex hull of points with rising abscissae."""
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def _elements(target: TargetLayer) -> int:
    return target.block_shape[0] * target.block_shape[1]


def _budget(targets: Sequence[TargetLayer]) -> int:
    """Elements of the blocks that uniform densities keep."""
    return sum(count * _elements(target) for target, count in zip(targets, uniform(targets).values(), strict=True))


__all__ = [
    "ALLOCATIONS",
    "by_global_score",
    "by_output_error",
    "check_allocation",
    "erdos_renyi_kernel",
    "uniform",
]
