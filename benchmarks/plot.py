"""Draws the README's plot from a result file of ``python -m pytorch_block_sparse benchmark --json``, prints its table.

    python benchmarks/plot.py benchmarks/results/cpu.json --output benchmarks/results/cpu.png

Plot: speed-up over dense against density, a line for each block size, a panel for each operator (columns) and dtype
(rows). Table, in Markdown: the same numbers, with the rate fraction in brackets.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

Row = dict[str, Any]
TITLES = {"forward": "forward", "input_grad": "input gradient", "weight_grad": "weight gradient"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of the benchmark command")
    parser.add_argument("--output", type=Path, help="the PNG (default: beside the result)")
    parser.add_argument("--shape", help="TxIxO (default: the first in the file)")
    options = parser.parse_args()
    try:
        result = json.loads(options.result.read_text())
        facts, rows = result["environment"], result["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"argument result: {options.result} is no result of the benchmark command: {error!r}")
    shapes = list(dict.fromkeys(shape_of(row) for row in rows))
    shape = options.shape or next(iter(shapes), None)
    if shape not in shapes:
        parser.error(f"argument --shape: must be one of {', '.join(shapes) or 'none'}, got {shape!r}")
    rows = [row for row in rows if shape_of(row) == shape]
    output = options.output or options.result.with_suffix(".png")
    draw(facts, rows, shape, output)
    print(markdown(rows))


def shape_of(row: Row) -> str:
    """TxIxO."""
    return "x".join(map(str, row["shape"]))


def values(rows: list[Row], key: str) -> list[Any]:
    """The distinct values of a key, in the order of the file."""
    return list(dict.fromkeys(row[key] for row in rows))


def asked(row: Row) -> float:
    """The density that was asked for: the stored one differs by the rounding to whole blocks."""
    return row["density_asked"]


def select(rows: list[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def where(facts: dict[str, Any]) -> str:
    """The machine, in a few words."""
    machine = facts.get("gpu") or f"{facts['cpu']} ({facts['capability']}), {facts['threads']} threads"
    return f"{machine}, torch {facts['torch']}"


def draw(facts: dict[str, Any], rows: list[Row], shape: str, output: Path) -> None:
    """Writes the PNG."""
    matplotlib.use("Agg")  # needs no display
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    operators, dtypes = values(rows, "operator"), values(rows, "dtype")
    densities = sorted(set(map(asked, rows)))
    figure, axes = plt.subplots(
        len(dtypes),
        len(operators),
        figsize=(4 * len(operators), 0.6 + 3.2 * len(dtypes)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for line, dtype in zip(axes, dtypes, strict=True):
        for axis, operator in zip(line, operators, strict=True):
            for block in values(rows, "block"):
                points = sorted(select(rows, dtype=dtype, operator=operator, block=block), key=asked)
                axis.plot(
                    [point["density"] for point in points],
                    [point["speedup"] for point in points],
                    marker="o",
                    label=f"{block}x{block} blocks",
                )
            axis.plot(
                densities, [1 / density for density in densities], color="gray", linestyle=":", label="1 / density"
            )
            axis.axhline(1, color="black", linewidth=1, linestyle="--", label="break-even with dense")
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xticks(densities, [f"{density:g}" for density in densities])
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
            for side in (axis.xaxis, axis.yaxis):
                side.set_minor_locator(NullLocator())
            axis.grid(alpha=0.3)
            axis.set_title(f"{TITLES.get(operator, operator)}, {dtype}")
        line[0].set_ylabel("speed-up over dense")
    for axis in axes[-1]:
        axis.set_xlabel("density")
    axes[0][-1].legend(fontsize=8)
    figure.suptitle(f"T x I x O = {shape}; {where(facts)}", fontsize=10)
    figure.savefig(output, dpi=120)
    plt.close(figure)


def markdown(rows: list[Row]) -> str:
    """Speed-up over dense (rate fraction), a column for each density."""
    densities = sorted(set(map(asked, rows)), reverse=True)
    lines = [
        "| | block | " + " | ".join(f"density {density:g}" for density in densities) + " |",
        "|---|---:|" + "---:|" * len(densities),
    ]
    for dtype in values(rows, "dtype"):
        for operator in values(rows, "operator"):
            for block in values(rows, "block"):
                cells = []
                for density in densities:
                    found = select(rows, dtype=dtype, operator=operator, block=block, density_asked=density)
                    text = "{speedup:.2f}x ({rate_fraction:.2f})"
                    cells.append(text.format(**found[0]) if found else "")
                lines.append(f"| {TITLES.get(operator, operator)}, {dtype} | {block} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
