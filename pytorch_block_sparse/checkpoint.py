"""Saving models that hold BlockSparseLinear layers, and loading them: safetensors and JSON, never pickle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from .checkpoint_file import new_tensors_name, open_model, stored_tensor, write_model
from .checkpoint_format import Description
from .checkpoint_plan import carry_out, plan_load
from .errors import BlockSparseError
from .layer_record import LayerRecord, sparse_layers


def save_sparse(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Saves a model: all its parameters and buffers, and the geometry of its BlockSparseLinear layers.

    ``directory`` then holds ``block_sparse.json``, which describes the layers, and the safetensors file that it names,
    which also carries that description and can be loaded alone. Tied tensors are stored once. Buffers that are not in
    the state dict are stored too, for models that are loaded from the meta device. A reader, or a crash, sees the whole
    old or the whole new model, never a mixture.

    Args:
        model: dense layers and sparse ones; tensors may be on any device.
        directory: made if need be; a model saved there before is replaced.

    Raises:
        BlockSparseError: a tensor holds no data or is not plain (sharded, quantized), or ``directory`` is a file.
        MissingPackageError: safetensors is not installed.

    >>> import tempfile
    >>> from pytorch_block_sparse import BlockSparseLinear
    >>> model = nn.Sequential(BlockSparseLinear(64, 96, density=0.5), nn.ReLU(), nn.Linear(96, 10))
    >>> other = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_sparse(model, directory)
    ...     load_sparse(directory, other)
    Sequential(
      (0): BlockSparseLinear(in_features=64, out_features=96, bias=True, block_shape=(32, 32), nnz=3, density=0.5)
      (1): ReLU()
      (2): Linear(in_features=96, out_features=10, bias=True)
    )
    """
    records = tuple(LayerRecord.of(path, layer) for path, layer in sparse_layers(model))
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    stored_as: dict[object, str] = {}
    persistent = model.state_dict(keep_vars=True)
    hidden = {name: buffer for name, buffer in _non_persistent_buffers(model) if name not in persistent}
    for name, tensor in {**persistent, **hidden}.items():
        data = stored_tensor(name, tensor)
        source = stored_as.setdefault(_memory(tensor), name)
        if source == name:
            tensors[name] = data
        else:
            aliases[name] = source
    description = Description(new_tensors_name(), records, aliases, tuple(hidden))
    write_model(Path(directory), description, tensors)


def load_sparse(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    device: torch.device | str | None = None,
) -> nn.Module | dict[str, Tensor]:
    """Loads what :func:`save_sparse` has written.

    Everything is checked before anything in ``model`` is changed: the version, that no tensor is missing, unexpected or
    of another shape, and that every block index is in range and stands once.

    Args:
        path: the directory, or the safetensors file in it alone.
        model: a model of the same architecture, dense or sparse. ``nn.Linear``, transformers' ``Conv1D`` and
            BlockSparseLinear layers of another block shape or activation are replaced by the saved layers; everything
            else is loaded in place, cast to the model's dtype and device as ``load_state_dict`` does. Tensors on the
            meta device are made anew, with the file's dtype. An optimizer must be made after loading where layers are
            replaced. None: no model is touched, and a state dict is returned.
        device: for tensors that are on the meta device, and for the state dict; the device of the model's other tensors
            if not given, or the CPU.

    Returns:
        ``model``; or the state dict, with all names (tied ones are the same tensor), which loads into a model whose
        BlockSparseLinear layers have the saved block shapes.

    Raises:
        BlockSparseError: a file is missing, truncated, damaged or of another version, or does not fit the model; the
            message names the file and the layer.
        MissingPackageError: safetensors is not installed.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise BlockSparseError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
    with open_model(path) as saved:
        if model is None:
            stored = {source: saved.tensor(source).to(device or "cpu") for source in map(saved.source, saved.names())}
            return {name: stored[saved.source(name)] for name in saved.names()}
        target = torch.device(device) if device is not None else _device_of(model)
        carry_out(plan_load(saved, model, target), saved, model, target)
    return model


def _non_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None:
                yield (f"{path}.{name}" if path else name), buffer


def _memory(tensor: Tensor) -> object:
    """Equal for two tensors only if they are the same data, seen the same way."""
    if tensor.numel() == 0:
        return id(tensor)  # without memory, every address is null
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _device_of(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


__all__ = ["load_sparse", "save_sparse"]
