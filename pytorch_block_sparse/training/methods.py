"""The methods of pattern optimisation: how often, how many blocks move, what is dropped and what is grown.

A method is data. Its signals are names, which ``sparse_optimizer.py`` looks up:

========== ==================================================================== =====================================
signal     drop: the blocks with the lowest ... go                              grow: the empty places with ... come
========== ==================================================================== =====================================
magnitude  Euclidean norm of the block
movement   minus the sum over all steps of weight x gradient, over the block
random                                                                          equal chances
gradient                                                                        the highest norm of the full gradient
========== ==================================================================== =====================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from ..checks import check_int, check_share


class Method(Protocol):
    """What :class:`SparseOptimizer` asks of a method; any object with these members serves.

    Attributes:
        interval: optimizer steps between two updates of the pattern.
        drop_signal: what ranks the stored blocks.
        grow_signal: what ranks the empty places; None if blocks never come back.
    """

    drop_signal: ClassVar[Literal["magnitude", "movement"]]
    grow_signal: ClassVar[Literal["random", "gradient"] | None]

    @property
    def interval(self) -> int:
        """Optimizer steps between two updates of the pattern."""

    def fraction_at(self, step: int) -> float:
        """The share of the stored blocks that are dropped and grown at ``step``."""


@dataclass(frozen=True)
class SET:
    """Sparse evolutionary training: the weakest blocks go, as many come at random empty places.

    Source: Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity inspired
    by network science", Nature Communications 2018, arXiv:1707.04780, algorithm 1; with the block's norm in place of
    the weight's size, and zeros in the new blocks.

    Args:
        interval: steps between two updates.
        fraction: share of the blocks that move at each, in (0, 1]; zeta in the paper.
        stop: the step from which on the pattern stays; None: never.
    """

    interval: int = 100
    fraction: float = 0.3
    stop: int | None = None

    drop_signal: ClassVar = "magnitude"
    grow_signal: ClassVar = "random"

    def __post_init__(self) -> None:
        check_int("interval", self.interval, 1)
        check_share("fraction", self.fraction)
        if self.stop is not None:
            check_int("stop", self.stop, 0)

    def fraction_at(self, step: int) -> float:
        """``fraction`` before ``stop``."""
        return self.fraction if self.stop is None or step < self.stop else 0.0


@dataclass(frozen=True)
class RigL:
    """The rigged lottery: the weakest blocks go, as many come where the gradient of the full weight is strongest.

    The share that moves falls along a cosine, fraction / 2 (1 + cos(pi t / stop)).

    Source: Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020, arXiv:1911.11134, algorithm 1;
    with block norms in place of single weights. There an update of the pattern takes an optimizer step's place, here
    it follows one, of the same gradient. As in the authors' code a block that is dropped and grown at once has not
    moved.

    Args:
        stop: the step from which on the pattern stays; the paper takes three quarters of the training.
        interval: steps between two updates.
        fraction: share of the blocks that move at the beginning, in (0, 1]; alpha in the paper.

    >>> [round(RigL(stop=1000).fraction_at(step), 3) for step in (0, 500, 1000)]
    [0.3, 0.15, 0.0]
    """

    stop: int
    interval: int = 100
    fraction: float = 0.3

    drop_signal: ClassVar = "magnitude"
    grow_signal: ClassVar = "gradient"

    def __post_init__(self) -> None:
        check_int("stop", self.stop, 1)
        check_int("interval", self.interval, 1)
        check_share("fraction", self.fraction)

    def fraction_at(self, step: int) -> float:
        """The cosine, 0 from ``stop`` on."""
        return self.fraction / 2 * (1 + math.cos(math.pi * step / self.stop)) if step < self.stop else 0.0


@dataclass(frozen=True)
class _Pruning:
    """Blocks go as the density schedule falls, and none come; which ones, ``drop_signal`` of the subclass says."""

    interval: int = 100

    grow_signal: ClassVar = None

    def __post_init__(self) -> None:
        check_int("interval", self.interval, 1)

    def fraction_at(self, step: int) -> float:
        """0: blocks go because the density falls, and for no other reason."""
        return 0.0


@dataclass(frozen=True)
class MagnitudePruning(_Pruning):
    """The blocks with the lowest norm go, as the density schedule falls, and none come.

    Source: Zhu and Gupta, 2017, arXiv:1710.01878; with the block's norm in place of the weight's size.

    Args:
        interval: steps between two updates; also the schedule's last step is one.
    """

    drop_signal: ClassVar = "magnitude"


@dataclass(frozen=True)
class MovementPruning(_Pruning):
    """The blocks that training moves towards zero go, as the density schedule falls, and none come.

    A block's score is S = - sum over the steps t of <W(t), dL/dW(t)>: it rises while the weights grow. It suits the
    fine-tuning of a pretrained model, where magnitude tells of the pretraining.

    Source: Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning", NeurIPS 2020, arXiv:2005.07683, equation
    (4); summed over blocks as in Lagunas et al., "Block Pruning For Faster Transformers", 2021, arXiv:2109.04838. What
    is pruned is gone here: it holds no weight whose score could bring it back.

    Args:
        interval: steps between two updates; also the schedule's last step is one.
    """

    drop_signal: ClassVar = "movement"
