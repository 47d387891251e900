"""The compiled module, and what to do when it is not there."""

from __future__ import annotations

import torch

try:
    from . import block_sparse_native
except ImportError as error:
    raise ImportError(
        "pytorch_block_sparse's native module is missing or does not fit this PyTorch "
        f"({torch.__version__}): {error}. Build it with: pip install --no-build-isolation . "
        "(in the source tree: make build)"
    ) from error

__all__ = ["block_sparse_native"]
