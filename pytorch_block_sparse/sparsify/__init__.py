"""Making trained models block sparse, and keeping them accurate.

``pytorch_block_sparse.sparsify`` is the function :func:`sparsify`; import from this package with
``from pytorch_block_sparse.sparsify import ...``.
"""

from .convert import densify, sparsify
from .distillation import DistillationReport, cosine_loss, distill, kl_loss
from .importance import Importance, LayerContext, magnitude, movement, obs, random_blocks, taylor, wanda
from .patcher import BlockSparseModelPatcher, PseudoBlockSparseLinear
from .report import LayerReport, SparsifyReport

__all__ = [
    "BlockSparseModelPatcher",
    "DistillationReport",
    "Importance",
    "LayerContext",
    "LayerReport",
    "PseudoBlockSparseLinear",
    "SparsifyReport",
    "cosine_loss",
    "densify",
    "distill",
    "kl_loss",
    "magnitude",
    "movement",
    "obs",
    "random_blocks",
    "sparsify",
    "taylor",
    "wanda",
]
