"""Replacing modules inside a model, and putting the old ones back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from .layers import Place


class ModuleSwap:
    """Replacements in one model that can be undone: for a while, or for good.

    A module that hangs in several places is replaced in all of them.
    """

    def __init__(self) -> None:
        self._done: list[tuple[tuple[Place, ...], nn.Module, nn.Module]] = []

    def replace(self, places: Sequence[Place], old: nn.Module, new: nn.Module) -> None:
        """Hangs ``new`` where ``old`` is."""
        self._done.append((tuple(places), old, new))
        _hang(places, new)

    def undo(self) -> None:
        """The model as it was."""
        for places, old, _ in reversed(self._done):
            _hang(places, old)
        self._done.clear()

    @contextlib.contextmanager
    def originals(self) -> Iterator[None]:
        """Inside this context the model has its old modules."""
        for places, old, _ in self._done:
            _hang(places, old)
        try:
            yield
        finally:
            for places, _, new in self._done:
                _hang(places, new)


def _hang(places: Sequence[Place], module: nn.Module) -> None:
    for parent, attribute in places:
        # Not setattr(): a container may define its own.
        parent._modules[attribute] = module


__all__ = ["ModuleSwap"]
