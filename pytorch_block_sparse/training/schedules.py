"""How dense a layer is at each step of the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..checks import check_int, check_share


class DensitySchedule(Protocol):
    """What :class:`SparseOptimizer` asks of a schedule; any object with these members serves.

    Attributes:
        end: the step from which on the density stays as it is; 0 if it never changes.
    """

    @property
    def end(self) -> int:
        """The step from which on the density stays."""

    def density(self, step: int, initial: float) -> float:
        """The density in (0, 1] after ``step`` optimizer steps, of a layer that began with density ``initial``."""


@dataclass(frozen=True)
class ConstantDensity:
    """Every layer keeps the density that it began with.

    >>> ConstantDensity().density(1000, initial=0.25)
    0.25
    """

    @property
    def end(self) -> int:
        """0: it never changes."""
        return 0

    def density(self, step: int, initial: float) -> float:
        """``initial``, at every step."""
        return initial


@dataclass(frozen=True)
class CubicDensity:
    """Gradual pruning: the density falls from the layer's own to ``final``, fast at first and then ever slower.

    d(t) = final + (initial - final) (1 - (t - begin) / (end - begin))³ between ``begin`` and ``end``.

    Source: Zhu and Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression", 2017,
    arXiv:1710.01878, equation (1), written there for the sparsity 1 - d.

    Args:
        final: density from ``end`` on, in (0, 1]. A layer that begins with less keeps what it has.
        end: the step at which ``final`` is reached.
        begin: the last step at which the density is the initial one.

    Raises:
        BlockSparseError: an argument is out of range.

    >>> schedule = CubicDensity(final=0.25, begin=100, end=300)
    >>> [schedule.density(step, initial=1.0) for step in (0, 100, 200, 300, 1000)]
    [1.0, 1.0, 0.34375, 0.25, 0.25]
    """

    final: float
    end: int
    begin: int = 0

    def __post_init__(self) -> None:
        check_share("final", self.final)
        check_int("begin", self.begin, 0)
        check_int("end", self.end, self.begin + 1)

    def density(self, step: int, initial: float) -> float:
        """The density after ``step`` steps."""
        if initial <= self.final or step <= self.begin:
            return initial
        left = 1 - (min(step, self.end) - self.begin) / (self.end - self.begin)
        return self.final + (initial - self.final) * left**3
