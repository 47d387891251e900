"""Importance of blocks: one interface, a score [R, C] for a layer, the higher the more worth keeping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import to_grid
from ..errors import BlockSparseError
from .calibration import Loss, Moments
from .reconstruction import build_regression, removal_costs


@dataclass(frozen=True)
class LayerContext:
    """What a measure may look at.

    Attributes:
        name: of the layer in its model.
        weight: [O, I], dense, in its own dtype.
        bias: [O] or None.
        block_shape: (bh, bw).
        moments: Σ x xᵀ of the layer's input over the calibration; None where the measure does not ask for it.
        cross: Σ x zᵀ with the input z in the dense model, where x is that of a model which is sparse already.
        gradients: (Σ |Σ w g|, Σ Σ w g), each [R, C]; None where the measure does not ask for it.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    block_shape: tuple[int, int]
    moments: Moments | None = None
    cross: Moments | None = None
    gradients: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Importance:
    """A measure of importance.

    Attributes:
        name: as in ``sparsify(importance=name)``.
        score: the function: context -> [R, C].
        needs_inputs: whether it reads ``moments``.
        needs_gradients: whether it reads ``gradients``.
        loss: for the gradients: (model output, batch) -> scalar; the output's own ``loss`` if not given.
    """

    name: str
    score: Callable[[LayerContext], Tensor]
    needs_inputs: bool = False
    needs_gradients: bool = False
    loss: Loss | None = None

    def __call__(self, context: LayerContext) -> Tensor:
        """Scores [R, C] on the CPU, checked.

        Raises:
            BlockSparseError: the score has another shape, or holds a NaN.
        """
        scores = self.score(context)
        grid = to_grid(context.weight, context.block_shape).shape[:2]
        if not isinstance(scores, Tensor) or scores.shape != grid:
            found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise BlockSparseError(f"importance must score the block grid {list(grid)} of {context.name}, got {found}")
        scores = scores.detach().float().cpu()
        if scores.isnan().any():
            raise BlockSparseError(f"importance must be a number for every block of {context.name}, got nan")
        return scores


def magnitude(norm: int = 2) -> Importance:
    """A block's L1 or L2 norm.

    Source: Han et al., "Learning both Weights and Connections for Efficient Neural Networks", 2015, arXiv:1506.02626.
    """
    if norm not in (1, 2):
        raise BlockSparseError(f"norm must be 1 or 2, got {norm!r}")
    return Importance(
        f"magnitude_l{norm}",
        lambda context: torch.linalg.vector_norm(
            to_grid(context.weight, context.block_shape).double(), ord=norm, dim=(2, 3)
        ),
    )


def wanda() -> Importance:
    """Weight times input norm: the L2 norm over a block of |w_ij| ||x_j||₂, with x_j feature j over all tokens.

    Source: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2023, arXiv:2306.11695.
    """

    def score(context: LayerContext) -> Tensor:
        norms = context.moments.total.diagonal()[:-1].sqrt()
        return torch.linalg.vector_norm(to_grid(context.weight.double() * norms, context.block_shape), dim=(2, 3))

    return Importance("wanda", score, needs_inputs=True)


def taylor(loss: Loss | None = None) -> Importance:
    """First-order change of the loss when a block is set to zero: |Σ w g| over the block, summed over batches.

    Source: Molchanov et al., "Importance Estimation for Neural Network Pruning", 2019, arXiv:1906.10771.

    Args:
        loss: (model output, batch) -> scalar tensor; the output's own ``loss`` if not given.
    """
    return Importance("taylor", lambda context: context.gradients[0], needs_gradients=True, loss=loss)


def movement(loss: Loss | None = None) -> Importance:
    """How far gradient descent moves a block away from zero: -Σ w g over block and batches.

    The score of one step from the pretrained weights; during training see ``pytorch_block_sparse.training``.

    Source: Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning", 2020, arXiv:2005.07683.

    Args:
        loss: (model output, batch) -> scalar tensor; the output's own ``loss`` if not given.
    """
    return Importance("movement", lambda context: -context.gradients[1], needs_gradients=True, loss=loss)


def random_blocks() -> Importance:
    """Any blocks, following ``torch.manual_seed``: what every other measure has to beat."""
    return Importance(
        "random", lambda context: torch.rand(to_grid(context.weight, context.block_shape).shape[:2], device="cpu")
    )


def obs() -> Importance:
    """The output error that a block's removal leaves once the rest of its row is refitted; the best of these.

    Source: Hassibi & Stork, 1992 (optimal brain surgeon); see :func:`.reconstruction.removal_costs`.
    """

    def score(context: LayerContext) -> Tensor:
        regression = build_regression(context.weight, context.bias, context.moments, context.cross)
        return removal_costs(regression, context.block_shape)

    return Importance("obs", score, needs_inputs=True)


IMPORTANCE: dict[str, Callable[[], Importance]] = {
    "magnitude": magnitude,
    "magnitude_l1": lambda: magnitude(1),
    "magnitude_l2": lambda: magnitude(2),
    "wanda": wanda,
    "taylor": taylor,
    "movement": movement,
    "random": random_blocks,
    "obs": obs,
}


def as_importance(importance: str | Importance | Callable[[LayerContext], Tensor]) -> Importance:
    """A measure from its name, itself, or a function of a :class:`LayerContext` that needs weights alone."""
    if isinstance(importance, Importance):
        return importance
    if isinstance(importance, str) and importance in IMPORTANCE:
        return IMPORTANCE[importance]()
    if callable(importance):
        return Importance(getattr(importance, "__name__", "custom"), importance)
    raise BlockSparseError(f"importance must be one of {', '.join(IMPORTANCE)}, or a function, got {importance!r}")


__all__ = [
    "IMPORTANCE",
    "Importance",
    "LayerContext",
    "as_importance",
    "magnitude",
    "movement",
    "obs",
    "random_blocks",
    "taylor",
    "wanda",
]
