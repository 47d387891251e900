"""Files of a saved model: written so that a reader sees the old or the new one, and checked in full before use."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint_format import DESCRIPTION_FILE, TENSORS_PREFIX, TENSORS_SUFFIX, Description
from .errors import BlockSparseError
from .layer_record import LayerRecord
from .optional import require
from .pattern import BlockPattern, on_cpu

# The description inside a tensor file's own header, so that the file alone can be loaded.
_HEADER_KEY = "pytorch_block_sparse"
_EXTRA = "save"

# Names of dtypes in a safetensors header (https://huggingface.co/docs/safetensors, "Format").
_HEADER_DTYPE = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32"}


def new_tensors_name() -> str:
    """A file name that no earlier save has used."""
    return f"{TENSORS_PREFIX}{secrets.token_hex(4)}{TENSORS_SUFFIX}"


def write_model(directory: Path, description: Description, tensors: Mapping[str, Tensor]) -> None:
    """Writes a saved model; a reader sees the whole old one or the whole new one, also after a crash.

    The new tensor file has a name of its own; the description, renamed into place last, is what makes it the model.

    Args:
        directory: made if need be.
        description: its ``tensors`` names the file to write.
        tensors: contiguous CPU tensors that share no memory.
    """
    save_file = require("safetensors.torch", _EXTRA).save_file
    if directory.exists() and not directory.is_dir():
        raise BlockSparseError(f"directory must be a directory, got the file {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    before = _tensors_of(directory)
    text = description.to_json()
    _write_atomically(
        directory / description.tensors,
        lambda path: save_file(dict(tensors), path, metadata={"format": "pt", _HEADER_KEY: text}),
    )
    _write_atomically(directory / DESCRIPTION_FILE, lambda path: path.write_text(text, encoding="utf-8"))
    if before is not None and before != description.tensors:
        (directory / before).unlink(missing_ok=True)


def _tensors_of(directory: Path) -> str | None:
    """The tensor file that the directory's description names; None where there is no readable description."""
    try:
        return Description.from_json((directory / DESCRIPTION_FILE).read_text(encoding="utf-8")).tensors
    except (OSError, ValueError):
        return None


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class SavedModel:
    """An open saved model, checked: every layer's tensors are there, of the recorded shape, with valid indices.

    Attributes:
        path: the tensor file.
        description: what it holds.
        patterns: the pattern of each layer, by path.
    """

    def __init__(self, path: Path, description: Description, file: Any) -> None:
        self.path = path
        self.description = description
        self._file = file
        self._stored = frozenset(file.keys())
        self._check_names()
        self.patterns = {record.path: self._pattern(record) for record in description.layers}

    def names(self) -> list[str]:
        """The names of the saved state dict, in the file's order, aliases last."""
        hidden = set(self.description.non_persistent)
        return [name for name in (*self._file.keys(), *self.description.aliases) if name not in hidden]

    def source(self, name: str) -> str:
        """The name under which a tensor is stored: its own, or that of the tensor it is tied to."""
        return self.description.aliases.get(name, name)

    def has(self, name: str) -> bool:
        """Whether a tensor of that name was saved."""
        return self.source(name) in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header."""
        return tuple(self._file.get_slice(self.source(name)).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's dtype, without reading its data."""
        return self._file.get_slice(self.source(name))[:0].dtype if self.shape(name) else self.tensor(name).dtype

    def nbytes(self) -> int:
        """Size of the tensor file."""
        return self.path.stat().st_size

    @on_cpu
    def tensor(self, name: str) -> Tensor:
        """A tensor's data, on the CPU."""
        return self._file.get_tensor(self.source(name))

    def _check_names(self) -> None:
        aliases = self.description.aliases
        for name, target in aliases.items():
            if name in self._stored or target not in self._stored:
                raise BlockSparseError(f"{self.path}: alias {name!r} of {target!r} contradicts the stored tensors")
        for name in self.description.non_persistent:
            if name not in self._stored and name not in aliases:
                raise BlockSparseError(f"{self.path}: the buffer {name!r} is missing")

    def _pattern(self, record: LayerRecord) -> BlockPattern:
        expected = {
            "values": ((record.nnz, *record.block_shape), record.dtype),
            "block_coords": ((record.nnz, 2), "int32"),
        }
        if record.bias:
            expected["bias"] = ((record.shape[0],), record.dtype)
        elif self.has(record.tensor_name("bias")):
            raise self._error(record, "bias is stored, but the layer is recorded without one")
        for name, (shape, dtype) in expected.items():
            full_name = record.tensor_name(name)
            if not self.has(full_name):
                raise self._error(record, f"{name} is missing")
            if self.shape(full_name) != shape:
                raise self._error(record, f"{name} must be {shape} as recorded, got {self.shape(full_name)}")
            found = self._file.get_slice(self.source(full_name)).get_dtype()
            if found != _HEADER_DTYPE[dtype]:
                raise self._error(record, f"{name} must be {dtype}, got {found}")
        try:
            coords = self.tensor(record.tensor_name("block_coords"))
            return BlockPattern.from_coords(coords, record.shape, record.block_shape)
        except BlockSparseError as error:
            raise self._error(record, str(error)) from None

    def _error(self, record: LayerRecord, message: str) -> BlockSparseError:
        return BlockSparseError(f"{self.path}: layer {record.path!r}: {message}")


@contextlib.contextmanager
def open_model(path: str | os.PathLike[str]) -> Iterator[SavedModel]:
    """Opens a saved model and checks it.

    Args:
        path: the directory, or its ``.safetensors`` file alone.

    Raises:
        BlockSparseError: there is no saved model, it is damaged, or of another version; the message names the file.
    """
    safetensors = require("safetensors", _EXTRA)
    path = Path(path)
    beside = None
    if path.is_dir():
        beside = path / DESCRIPTION_FILE
        if not beside.is_file():
            raise BlockSparseError(f"{path} holds no model saved by save_sparse: there is no {DESCRIPTION_FILE}")
        directory, path = path, path / _read_description(beside, _read_text(beside)).tensors
        if not path.is_file():  # somebody saved again between the two reads
            path = directory / _read_description(beside, _read_text(beside)).tensors
    if not path.is_file():
        raise BlockSparseError(f"{path}: there is no such file")
    try:
        file = safetensors.safe_open(path, framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise BlockSparseError(f"{path}: truncated, or no safetensors file: {error}") from None
    with file:
        text = (file.metadata() or {}).get(_HEADER_KEY)
        if text is None:
            raise BlockSparseError(f"{path} was not written by save_sparse: its header has no {_HEADER_KEY!r}")
        description = _read_description(path, text)
        if beside is not None and _read_description(beside, _read_text(beside)) != description:
            raise BlockSparseError(f"{beside} contradicts the header of {path.name}")
        yield SavedModel(path, description, file)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BlockSparseError(f"{path}: not a text file: {error}") from None


def _read_description(path: Path, text: str) -> Description:
    try:
        return Description.from_json(text)
    except BlockSparseError as error:
        raise BlockSparseError(f"{path}: {error}") from None


def stored_tensor(name: str, tensor: Tensor) -> Tensor:
    """A tensor as it is written: detached, contiguous, on the CPU, with memory of its own size.

    Raises:
        BlockSparseError: it holds no data, or is no plain strided tensor (sharded, quantized, sparse).
    """
    if not isinstance(tensor, Tensor):
        raise BlockSparseError(f"{name} must be a tensor to be saved, got {type(tensor).__name__}")
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise BlockSparseError(f"{name} must be a plain strided tensor to be saved, got {type(tensor).__name__}")
    if tensor.is_meta:
        raise BlockSparseError(f"{name} must hold data to be saved, got a meta tensor")
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # a view: the rest of its memory must not be written
    return tensor


__all__ = ["SavedModel", "new_tensors_name", "open_model", "stored_tensor", "write_model"]
