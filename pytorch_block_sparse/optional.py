"""The one door for packages that only some features need: they are imported when used, never with the package."""

from __future__ import annotations

import importlib
from types import ModuleType

from .errors import BlockSparseError


class MissingPackageError(BlockSparseError, ImportError):
    """A feature's package is not installed: the message says how to install it."""


def require(package: str, extra: str) -> ModuleType:
    """The imported module ``package``.

    Args:
        package: importable name, ``"scipy.sparse"`` for example.
        extra: the extra of this project that installs it.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"this needs the package {package.partition('.')[0]}, which could not be imported ({error}): "
            f"pip install 'pytorch_block_sparse[{extra}]'"
        ) from error
