"""The command line. One module a command, each with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..errors import BlockSparseError
from . import benchmark, info, sparsify

_COMMANDS = {"info": info, "benchmark": benchmark, "sparsify": sparsify}


def build_parser() -> argparse.ArgumentParser:
    """The parser with one sub-command a module."""
    parser = argparse.ArgumentParser(prog="python -m pytorch_block_sparse", description="Block-sparse linear layers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: those of the process if not given.

    Returns:
        The exit status: 0, or 1 where a result was wrong. A bad argument exits with 2, as argparse does.
    """
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except BlockSparseError as error:
        options.parser.error(str(error))
