"""Command-line options that the examples share, and their checks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from pytorch_block_sparse import BlockSparseError
from pytorch_block_sparse.cli.environment import pick_device


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Adds --device and --output."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "output", help="folder for the plot")


def check_shared(parser: argparse.ArgumentParser, options: argparse.Namespace, densities: Iterable[float]) -> None:
    """Checks the densities, and makes ``options.device`` a ``torch.device``; ends the program where one is wrong."""
    for density in densities:
        if not 0 < density <= 1:
            parser.error(f"argument --density: must be in (0, 1], got {density}")
    try:
        options.device = pick_device(options.device)
    except BlockSparseError as error:
        parser.error(str(error))
