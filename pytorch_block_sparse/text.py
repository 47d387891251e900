"""Tables and progress bars for a terminal."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Aligned text: the first ``left`` columns to the left, the others to the right.

    >>> print(table(["op", "ms"], [["forward", 1.5], ["x", 10]]))
    op        ms
    forward  1.5
    x         10
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


class _NoProgress:
    """What stands in for tqdm where it is not installed."""

    def __enter__(self) -> _NoProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, amount: float = 1) -> None:
        pass

    def set_description(self, text: str) -> None:
        pass

    def set_postfix_str(self, text: str) -> None:
        pass


def progress(total: float, **options: Any) -> Any:
    """A tqdm bar; one that shows nothing where tqdm is not installed."""
    try:
        tqdm = importlib.import_module("tqdm")
    except ImportError:
        return _NoProgress()
    return tqdm.tqdm(total=total, **options)
