"""The ranks that train copies of one model, and what they have to agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..block_sparse_linear import BlockSparseLinear
from ..errors import BlockSparseError


class Replicas:
    """The ranks of a process group; a single one, and no communication, where ``torch.distributed`` is not in use.

    Args:
        group: the process group; None: all ranks, if there are any.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.size = (
            distributed.get_world_size(group) if distributed.is_available() and distributed.is_initialized() else 1
        )

    def sum_(self, tensor: Tensor) -> None:
        """Adds ``tensor`` up over the ranks, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor, group=self._group)

    def average_(self, tensor: Tensor) -> None:
        """The mean of ``tensor`` over the ranks, in place."""
        if self.size > 1:
            self.sum_(tensor)
            tensor.div_(self.size)

    def broadcast_(self, tensor: Tensor) -> None:
        """The first rank's ``tensor``, in place."""
        if self.size > 1:
            distributed.broadcast(tensor, group=self._group, group_src=0)

    def align(self, layers: Sequence[BlockSparseLinear]) -> None:
        """Gives every rank the first rank's blocks: coordinates and values, slot by slot.

        Raises:
            BlockSparseError: a layer's number of blocks differs between ranks; raised on all of them.
        """
        if self.size == 1:
            return
        device = layers[0].values.device
        counts = torch.tensor([layer.pattern.nnz for layer in layers], device=device)
        first = counts.clone()
        self.broadcast_(first)
        differing = (counts != first).long()
        self.sum_(differing)
        if differing.any():
            raise BlockSparseError(
                f"every rank must have the same number of blocks in each layer, but {int((differing > 0).sum())} of "
                f"{len(layers)} layers differ; this rank has {counts.tolist()}"
            )
        for layer in layers:
            coords = layer.block_coords.detach().clone()
            self.broadcast_(coords)
            if not torch.equal(coords, layer.block_coords):
                layer.rewire(torch.arange(len(coords)), coords)
            self.broadcast_(layer.values.data)


def take_from_ddp(model: nn.Module, layers: dict[str, BlockSparseLinear], replicas: Replicas) -> None:
    """Has the gradients of some layers' values averaged as they come, without ``DistributedDataParallel``.

    Its buckets are cut once, so that a parameter whose size changes cannot be in them; a list on the module, which it
    reads when it is made, tells it to leave them alone.

    Args:
        model: what will be wrapped.
        layers: by their names in ``model``.
        replicas: the ranks to average over.
    """
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for name, layer in layers.items():
        # For the module itself DDP looks both forms up.
        prefixes = [f"{name}."] if name else ["", "."]
        ignored += [prefix + entry for prefix in prefixes for entry in ("values", "block_coords")]
        # With accumulated gradients this averages again what was averaged, which is the same on all ranks and stays.
        layer.values.register_post_accumulate_grad_hook(lambda values: replicas.average_(values.grad))
    model._ddp_params_and_buffers_to_ignore = ignored
