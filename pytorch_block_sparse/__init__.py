"""Block-sparse linear layers for PyTorch: memory, forward and gradients cost what the stored blocks cost."""

from importlib.metadata import PackageNotFoundError, version

from . import backends, ops, training
from .block_sparse import BlockSparseMatrix
from .block_sparse_linear import BlockSparseLinear
from .checkpoint import load_sparse, save_sparse
from .errors import BlockSparseError
from .pattern import BlockPattern
from .sparsify import BlockSparseModelPatcher, SparsifyReport, densify, distill, sparsify
from .training import SparseOptimizer

try:
    __version__ = version("pytorch_block_sparse")
except PackageNotFoundError:  # built in place, not installed
    __version__ = "0+source"

__all__ = [
    "BlockPattern",
    "BlockSparseError",
    "BlockSparseLinear",
    "BlockSparseMatrix",
    "BlockSparseModelPatcher",
    "SparseOptimizer",
    "SparsifyReport",
    "backends",
    "densify",
    "distill",
    "load_sparse",
    "ops",
    "save_sparse",
    "sparsify",
    "training",
]
