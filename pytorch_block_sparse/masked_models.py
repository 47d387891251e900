"""Models that another tool has pruned with masks: dense weights with blocks of zeros, and nn_pruning's mask scores.

huggingface/nn_pruning saves a model in one of two forms. *Compiled*, a masked weight is an ordinary dense one with
zeros: :func:`replace_masked_layers` makes its layers block sparse. *In training*, every masked layer has scores beside
its weight: :func:`apply_mask_scores` turns such a state dict into the first form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .block_sparse import BlockSparseMatrix
from .block_sparse_linear import BlockSparseLinear
from .checks import check_pair
from .dense_layers import dense_weight, is_conv1d
from .errors import BlockSparseError
from .layer_replacement import set_module
from .pattern import BlockPattern
from .pattern_input import DEFAULT_BLOCK_SHAPE

# A layer's scores: nn_pruning's (0: blocks or block rows, 1: block columns), and the movement pruning examples'.
_SCORES = re.compile(r"(?P<path>.*?)\.(?:mask_module\.context_modules\.(?P<place>[01])\.)?mask_scores")
_METHODS = ("topK", "threshold", "sigmoied_threshold", "l0")  # the names, and their spelling, are nn_pruning's
# Hard concrete gates, Louizos et al. 2018: a sigmoid stretched to (-0.1, 1.1), then cut to [0, 1].
_GATE_LOW, _GATE_HIGH = -0.1, 1.1


def patterns_from_zeros(
    source: nn.Module | Mapping[str, Tensor], block_shape: tuple[int, int] = DEFAULT_BLOCK_SHAPE
) -> dict[str, BlockPattern]:
    """The blocks that are not all zero, of every weight that has an all-zero block.

    Args:
        source: a model, of which ``nn.Linear`` and transformers' ``Conv1D`` layers are looked at; or a state dict, of
            which all tensors of 2 dimensions named ``*.weight`` are, taken as [O, I].
        block_shape: (bh, bw).

    Returns:
        {path of the layer: its pattern}.

    Raises:
        BlockSparseError: ``source`` is neither, or a weight holds no data.
    """
    block_shape = check_pair("block_shape", block_shape)
    if isinstance(source, nn.Module):
        weights = {path: dense_weight(module) for path, module in source.named_modules() if _is_dense_layer(module)}
    elif isinstance(source, Mapping):
        weights = {
            name.removesuffix(".weight"): tensor
            for name, tensor in source.items()
            if name.endswith(".weight") and isinstance(tensor, Tensor) and tensor.dim() == 2
        }
    else:
        raise BlockSparseError(f"source must be a torch.nn.Module or a state dict, got {type(source).__name__}")
    patterns = {}
    for path, weight in weights.items():
        if weight.is_meta:
            raise BlockSparseError(f"source must hold data, got a meta tensor for {path!r}")
        pattern = BlockSparseMatrix.from_dense(weight, block_shape).pattern
        if pattern.density < 1:
            patterns[path] = pattern
    return patterns


def replace_masked_layers(
    model: nn.Module,
    block_shape: tuple[int, int] = DEFAULT_BLOCK_SHAPE,
    *,
    patterns: Mapping[str, BlockPattern] | None = None,
    max_density: float = 1.0,
) -> dict[str, BlockPattern]:
    """Makes layers whose weights have all-zero blocks BlockSparseLinear layers, in place and exactly.

    Args:
        model: is changed. ``nn.Linear`` and transformers' ``Conv1D`` layers; optimizers must be made after it.
        block_shape: (bh, bw).
        patterns: {path: the blocks to store}, instead of those that are not all zero. They must hold every element of
            the weight that is not zero.
        max_density: layers that keep a larger share of their blocks stay dense: they would gain little.

    Returns:
        {path: pattern} of the layers that were replaced.

    Raises:
        BlockSparseError: a path, a pattern or a weight does not fit, or a weight is shared with another module; nothing
            is changed then.
    """
    if not isinstance(model, nn.Module):
        raise BlockSparseError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not 0 < max_density <= 1:
        raise BlockSparseError(f"max_density must be in (0, 1], got {max_density!r}")
    if patterns is None:
        patterns = patterns_from_zeros(model, block_shape)
    patterns = {path: pattern for path, pattern in patterns.items() if pattern.density <= max_density}
    paths_of: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths_of.setdefault(id(module), []).append(path)
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: dict[int, BlockSparseLinear] = {}
    for path, pattern in patterns.items():
        module = modules.get(path)
        if path == "" or module is None or not _is_dense_layer(module):
            raise BlockSparseError(
                f"{path!r} must be an nn.Linear or transformers' Conv1D inside the model, "
                f"got {type(module).__name__ if module is not None else 'no such module'}"
            )
        _check_not_shared(model, path, module)
        layer = BlockSparseLinear.from_linear(module, pattern=pattern)
        # == compares -0.0 and 0.0 as equal, and NaN as lost, as it should be.
        if not torch.equal(layer.weight.to_dense(), dense_weight(module)):
            raise BlockSparseError(f"the pattern of {path!r} leaves out elements of the weight that are not zero")
        layers[id(module)] = layer
    for module_id, layer in layers.items():
        for path in paths_of[module_id]:
            set_module(model, path, layer)
    return patterns


def apply_mask_scores(
    state_dict: Mapping[str, Tensor],
    threshold: float,
    *,
    method: str = "topK",
    block_shape: tuple[int, int] | None = None,
) -> tuple[dict[str, Tensor], dict[str, BlockPattern]]:
    """A state dict of a model that nn_pruning is training, as that of the dense model with masked weights.

    Scores of blocks [R, C], of block rows [R] and block columns [C] (their products then count), and of the movement
    pruning examples ([R, C] beside the weight) are understood.

    Sources: Lagunas et al., "Block Pruning For Faster Transformers", 2021, arXiv:2109.04838; Sanh et al., "Movement
    Pruning: Adaptive Sparsity by Fine-Tuning", 2020, arXiv:2005.07683; for "l0" Louizos et al., "Learning Sparse Neural
    Networks through L0 Regularization", 2018, arXiv:1712.01312.

    Args:
        state_dict: is not changed.
        threshold: the final one of the training. "topK": the share of a layer's blocks that is kept, in (0, 1];
            "threshold": scores above it are kept; "sigmoied_threshold": the same of their sigmoid; "l0": not read.
        method: nn_pruning's name of it. "l0" also scales weights by their gates.
        block_shape: (bh, bw), needed where a layer has scores of one side only.

    Returns:
        The dense state dict, without scores; and {path: the pattern of the kept blocks}, for ``replace_masked_layers``.

    Raises:
        BlockSparseError: ``method`` or ``threshold`` is out of range, or scores do not fit their weight.
    """
    if method not in _METHODS:
        raise BlockSparseError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or threshold != threshold:
        raise BlockSparseError(f"threshold must be a number, got {threshold!r}")
    if method == "topK" and not 0 < threshold <= 1:
        raise BlockSparseError(f"threshold must be in (0, 1] for topK, got {threshold!r}")
    scores: dict[str, dict[int, Tensor]] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if ".ampere_module." in name:
            raise BlockSparseError(f"{name}: 2:4 sparsity inside blocks cannot be stored as whole blocks")
        match = _SCORES.fullmatch(name)
        if match:
            scores.setdefault(match["path"], {})[int(match["place"] or 0)] = tensor.detach()
        else:
            dense[name] = tensor
    patterns = {}
    for path, of_layer in scores.items():
        weight = dense.get(f"{path}.weight")
        if weight is None or weight.dim() != 2:
            raise BlockSparseError(f"{path}.weight must be a matrix beside its mask_scores, got none")
        grid_scores = _grid_scores(path, of_layer, weight, block_shape)
        gates = _gates(grid_scores.float(), method, threshold)
        block = (weight.shape[0] // gates.shape[0], weight.shape[1] // gates.shape[1])
        elements = gates.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1).to(weight)
        dense[f"{path}.weight"] = (weight.detach() * elements).masked_fill_(elements == 0, 0)
        patterns[path] = BlockPattern.from_mask(gates > 0, block)
    return dense, patterns


def _is_dense_layer(module: nn.Module) -> bool:
    # Subclasses of nn.Linear are read in ways that a sparse layer cannot serve (MultiheadAttention's out_proj).
    return type(module) is nn.Linear or is_conv1d(module)


def _check_not_shared(model: nn.Module, path: str, module: nn.Module) -> None:
    for other_path, other in model.named_modules():
        if other is not module and any(parameter is module.weight for parameter in other._parameters.values()):
            raise BlockSparseError(f"{path!r} shares its weight with {other_path!r}: only one of them could be sparse")


def _grid_scores(path: str, scores: dict[int, Tensor], weight: Tensor, block_shape: tuple[int, int] | None) -> Tensor:
    """Scores as a grid [R, C] that divides the weight evenly."""
    if scores.get(0, torch.empty(0)).dim() == 2:
        grid = scores[0]
    else:
        sides = []
        for place in (0, 1):
            if place not in scores:
                if block_shape is None:
                    raise BlockSparseError(f"block_shape must be given: {path!r} has mask_scores of one side only")
                sides.append(torch.ones(weight.shape[place] // check_pair("block_shape", block_shape)[place]))
            elif scores[place].dim() == 1:
                sides.append(scores[place].cpu())
            else:
                raise BlockSparseError(f"{path}: mask_scores must be [R, C], or [R] and [C], got {scores[place].shape}")
        grid = torch.outer(*sides)
    grid = grid.cpu()
    if not all(grid.shape) or weight.shape[0] % grid.shape[0] or weight.shape[1] % grid.shape[1]:
        raise BlockSparseError(
            f"{path}: mask_scores {list(grid.shape)} must divide the weight {list(weight.shape)} into equal blocks"
        )
    return grid


def _gates(scores: Tensor, method: str, threshold: float) -> Tensor:
    """What the blocks [R, C] are multiplied by: 0 or 1, or for l0 what is between."""
    if method == "l0":
        return (torch.sigmoid(scores) * (_GATE_HIGH - _GATE_LOW) + _GATE_LOW).clamp(0, 1)
    flat = scores.flatten()
    gates = torch.zeros_like(flat)
    if method == "topK":
        gates[flat.argsort(descending=True, stable=True)[: int(threshold * flat.numel())]] = 1
    else:
        # nn_pruning never prunes a layer away: half a percent, at least one block, stays even where no score is above.
        least = int(0.005 * flat.numel()) + 1
        kept = (torch.sigmoid(flat) if method == "sigmoied_threshold" else flat) > threshold
        if int(kept.sum()) < least:
            kept = flat > flat.kthvalue(max(flat.numel() - least, 1)).values
        gates[kept] = 1
    return gates.view_as(scores)


__all__ = ["apply_mask_scores", "patterns_from_zeros", "replace_masked_layers"]
