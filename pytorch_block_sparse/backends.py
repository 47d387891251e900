"""Settings of the back ends, in the manner of ``torch.backends``: of the whole process, read at every call.

*Densify plan.* On a GPU, where blocks are small or many, cuBLAS on a dense matrix beats every kernel on the blocks.
There the forward and the input gradient scatter the blocks into a dense temporary [O, I] before the product, and the
weight gradient gathers them from one after it. "auto", the default, does so where it is predicted to win by more than
5 % and the temporary takes at most a sixteenth of the GPU's memory; "never" keeps memory in proportion to the stored
blocks; "always" does so wherever memory allows. The environment's ``BLOCK_SPARSE_DENSIFY`` says what a process begins
with. The CPU never densifies.

A densified forward or input gradient multiplies the absent blocks as zeros, so that an infinite or NaN feature of a
token makes every result of that token NaN, as in a dense layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import BlockSparseError
from .native import block_sparse_native

DENSIFY_MODES = ("auto", "never", "always")


def get_densify_plan() -> str:
    """When products are densified: "auto", "never" or "always".

    >>> get_densify_plan()
    'auto'
    """
    return block_sparse_native.densify_mode()


def set_densify_plan(mode: str) -> None:
    """Sets when products are densified; a CUDA graph keeps the plan that it was captured with.

    Args:
        mode: "auto", "never" or "always".

    Raises:
        BlockSparseError: ``mode`` is none of them.
    """
    if mode not in DENSIFY_MODES:
        raise BlockSparseError(f"mode must be one of {', '.join(DENSIFY_MODES)}, got {mode!r}")
    block_sparse_native.set_densify_mode(mode)


@contextmanager
def densify_plan(mode: str) -> Iterator[None]:
    """:func:`set_densify_plan`, undone at the end of the ``with`` block, or of the function that it decorates.

    >>> with densify_plan("never"):
    ...     get_densify_plan()
    'never'
    """
    before = get_densify_plan()
    set_densify_plan(mode)
    try:
        yield
    finally:
        set_densify_plan(before)
