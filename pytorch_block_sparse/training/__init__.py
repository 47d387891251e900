"""Training the pattern: which blocks are stored changes while the values are trained.

>>> sorted(__all__)  # doctest: +ELLIPSIS
['ConstantDensity', 'CubicDensity', 'DensitySchedule', ..., 'SparseOptimizer', ...]
"""

from .gradient_tap import gradient_block_norms
from .methods import SET, MagnitudePruning, Method, MovementPruning, RigL
from .schedules import ConstantDensity, CubicDensity, DensitySchedule
from .sparse_optimizer import LayerUpdate, SparseOptimizer

__all__ = [
    "SET",
    "ConstantDensity",
    "CubicDensity",
    "DensitySchedule",
    "LayerUpdate",
    "MagnitudePruning",
    "Method",
    "MovementPruning",
    "RigL",
    "SparseOptimizer",
    "gradient_block_norms",
]
