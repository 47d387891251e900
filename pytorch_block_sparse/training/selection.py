"""Which blocks a layer stores next: a pure function of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import BlockPattern, on_cpu


@on_cpu
def select_blocks(
    pattern: BlockPattern,
    drop_scores: Tensor,
    grow_scores: Tensor | None,
    count: int,
    fraction: float,
) -> Tensor:
    """The blocks to store next.

    Of the stored blocks all but round(fraction * count) stay, those with the highest drop scores; the rest of ``count``
    are the places outside them with the highest grow scores. Such a place may be that of a block just dropped, which
    then simply stays: so there are always places enough, however few are empty.

    Args:
        pattern: the blocks stored now.
        drop_scores: [nnz], by slot; ties favour the lower slot.
        grow_scores: [R, C]; ties favour the earlier place in row order. None: nothing grows.
        count: blocks to store next, at most R * C.
        fraction: share of them to drop and grow.

    Returns:
        bool [R, C] with ``count`` blocks (with fewer if none grow and fewer are stored now).
    """
    survivors = min(count, pattern.nnz)
    if grow_scores is not None:
        survivors -= round(fraction * survivors)
    order = drop_scores.cpu().argsort(descending=True, stable=True)
    rows, cols = pattern.block_coords[order[:survivors]].long().unbind(1)
    mask = torch.zeros(pattern.grid_shape, dtype=torch.bool)
    mask[rows, cols] = True
    if grow_scores is not None and count > survivors:
        places = (~mask).flatten().nonzero()[:, 0]
        best = grow_scores.cpu().flatten()[places].argsort(descending=True, stable=True)
        mask.view(-1)[places[best[: count - survivors]]] = True
    return mask
