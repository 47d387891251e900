"""Pictures of block grids, with matplotlib, which only they need."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .optional import require

STORED = "#1f6feb"
ABSENT = "#eef1f5"


def new_figure(**options: Any) -> Any:
    """A ``matplotlib.figure.Figure`` that needs no display and leaves pyplot's state alone."""
    return require("matplotlib.figure", "plot").Figure(layout="constrained", **options)


def draw_blocks(axes: Any, mask: Tensor, title: str) -> None:
    """Draws a block grid, bool [R, C], stored blocks in colour."""
    colors = require("matplotlib.colors", "plot")
    axes.imshow(
        mask.numpy(), cmap=colors.ListedColormap([ABSENT, STORED]), vmin=0, vmax=1, aspect="auto", interpolation="none"
    )
    axes.set_title(title, fontsize=7)
    axes.set_xticks([])
    axes.set_yticks([])
