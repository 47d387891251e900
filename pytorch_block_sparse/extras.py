"""Optional packages: imported when they are needed, with an error that says what to install."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import BlockSparseError


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Imports ``module``, which only ``pip install pytorch_block_sparse[extra]`` brings.

    Args:
        module: the dotted name to import.
        extra: the extra of this package that installs it.
        purpose: what needs it; the error message begins with it.

    Returns:
        The module.

    Raises:
        BlockSparseError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise BlockSparseError(
            f"{purpose} needs {package}, which is not installed: pip install pytorch_block_sparse[{extra}]"
        ) from error
