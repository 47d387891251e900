"""The picture of a SparsifyReport: a block map, a density and an error for every layer."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from ..plotting import ABSENT, STORED, draw_blocks, new_figure

if TYPE_CHECKING:
    from .report import SparsifyReport

_MAPS_A_ROW = 6


def plot_report(report: SparsifyReport, path: str | os.PathLike[str]) -> None:
    """Writes the picture to ``path``; the suffix chooses the format."""
    layers = report.layers
    map_rows = math.ceil(len(layers) / _MAPS_A_ROW)
    bars_height = max(2.5, 0.16 * len(layers))
    figure = new_figure(figsize=(12, 1.7 * map_rows + bars_height + 0.6))
    maps, bars = figure.subfigures(2, 1, height_ratios=(1.7 * map_rows, bars_height))
    grid = maps.subplots(map_rows, _MAPS_A_ROW, squeeze=False).flatten()
    for axes, layer in zip(grid, layers, strict=False):
        draw_blocks(axes, layer.pattern.mask(), f"{layer.name}\n{layer.pattern.shape}, {layer.density:.2f}")
    for axes in grid[len(layers) :]:
        axes.set_axis_off()
    density, error = bars.subplots(1, 2, sharey=True)
    places = range(len(layers))
    density.barh(places, [1.0] * len(layers), color=ABSENT)
    density.barh(places, [layer.density for layer in layers], color=STORED)
    density.set(title=f"density ({report.density:.3f} in all)", xlim=(0, 1))
    density.set_yticks(places, [layer.name for layer in layers], fontsize=6)
    density.invert_yaxis()
    measured = [layer.output_error for layer in layers]
    if None in measured:
        error.barh(places, [layer.weight_error for layer in layers], color=STORED)
        error.set(title="relative error of the weights")
    else:
        error.barh(places, measured, color=STORED)
        error.set(title="relative error of the output, on the calibration inputs")
    for axes in (density, error):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


__all__ = ["plot_report"]
