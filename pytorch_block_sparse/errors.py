"""The one public error of the package."""

from __future__ import annotations


class BlockSparseError(ValueError):
    """Bad input: the message names the argument, the rule it breaks and the value found."""
