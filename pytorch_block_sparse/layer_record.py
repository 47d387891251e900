"""LayerRecord: what a saved file says of one BlockSparseLinear, as JSON and back; from outside, so checked in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .block_sparse_linear import BlockSparseLinear
from .checks import check_int, check_pair
from .errors import BlockSparseError
from .ops import DTYPES, check_activation
from .pattern import block_grid

_DTYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class LayerRecord:
    """The geometry of one layer.

    Attributes:
        path: its name in the model, as in ``named_modules()``.
        shape: (O, I) = (out_features, in_features).
        block_shape: (bh, bw).
        nnz: stored blocks.
        bias: whether it has one.
        activation: None, or as in :class:`BlockSparseLinear`.
        dtype: of values and bias: "float64", "float32", "bfloat16" or "float16".
        activation_name: the attribute of its parent that is an ``nn.Identity``, because the layer computes the
            activation that the model's class has there; None, and not in the JSON, if it replaces none.
    """

    path: str
    shape: tuple[int, int]
    block_shape: tuple[int, int]
    nnz: int
    bias: bool
    activation: str | None
    dtype: str
    activation_name: str | None = None

    @classmethod
    def of(cls, path: str, layer: BlockSparseLinear) -> LayerRecord:
        """The record of a layer as it is now."""
        pattern = layer.pattern
        return cls(
            path=path,
            shape=pattern.shape,
            block_shape=pattern.block_shape,
            nnz=pattern.nnz,
            bias=layer.bias is not None,
            activation=layer.activation,
            dtype=str(layer.values.dtype).removeprefix("torch."),
            activation_name=layer.dense_origin.activation_name,
        )

    @classmethod
    def from_json(cls, fields: Any) -> LayerRecord:
        """The record of a JSON object.

        Raises:
            BlockSparseError: a field is missing, unknown or out of range; the message names the layer.
        """
        optional = {"activation_name"}
        names = [field.name for field in dataclasses.fields(cls) if field.name not in optional]
        if not isinstance(fields, dict) or set(fields) - optional != set(names):
            raise BlockSparseError(f"a layer must be an object with the fields {', '.join(names)}, got {fields!r:.200}")
        path = fields["path"]
        if not isinstance(path, str):
            raise BlockSparseError(f"a layer's path must be a string, got {path!r:.200}")
        try:
            shape = check_pair("shape", fields["shape"])
            block_shape = check_pair("block_shape", fields["block_shape"])
            rows, cols = block_grid(shape, block_shape)
            nnz = check_int("nnz", fields["nnz"], 0, rows * cols)
            if not isinstance(fields["bias"], bool):
                raise BlockSparseError(f"bias must be true or false, got {fields['bias']!r}")
            if fields["activation"] is not None and not isinstance(fields["activation"], str):
                raise BlockSparseError(f"activation must be a string or null, got {fields['activation']!r}")
            check_activation(fields["activation"])
            activation_name = fields.get("activation_name")
            if activation_name is not None and not (isinstance(activation_name, str) and fields["activation"]):
                raise BlockSparseError(
                    f"activation_name must be a string, with an activation, or missing, got {activation_name!r:.200}"
                )
            if fields["dtype"] not in tuple(_DTYPE_BY_NAME):
                raise BlockSparseError(f"dtype must be one of {', '.join(_DTYPE_BY_NAME)}, got {fields['dtype']!r}")
        except BlockSparseError as error:
            raise BlockSparseError(f"layer {path!r}: {error}") from None
        return cls(
            path, shape, block_shape, nnz, fields["bias"], fields["activation"], fields["dtype"], activation_name
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the attributes as fields."""
        fields = {**dataclasses.asdict(self), "shape": list(self.shape), "block_shape": list(self.block_shape)}
        if self.activation_name is None:
            del fields["activation_name"]
        return fields

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as PyTorch's own."""
        return _DTYPE_BY_NAME[self.dtype]

    @property
    def density(self) -> float:
        """Stored blocks over all blocks."""
        rows, cols = block_grid(self.shape, self.block_shape)
        return self.nnz / (rows * cols)

    def tensor_name(self, name: str) -> str:
        """The name of the layer's tensor ``name`` in the model's state dict."""
        return f"{self.path}.{name}" if self.path else name


def records_from_json(layers: Any) -> tuple[LayerRecord, ...]:
    """The records of a JSON list.

    Raises:
        BlockSparseError: it is no list, a record is damaged, or a path stands twice.
    """
    if not isinstance(layers, list):
        raise BlockSparseError(f"layers must be a list, got {type(layers).__name__}")
    records = tuple(LayerRecord.from_json(fields) for fields in layers)
    if twice := first_repeated(record.path for record in records):
        raise BlockSparseError(f"layer {twice[0]!r} stands twice")
    return records


def first_repeated(names: Iterable[str]) -> list[str]:
    """[the first name that comes again], or []."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return [name]
        seen.add(name)
    return []


def sparse_layers(model: nn.Module) -> Iterator[tuple[str, BlockSparseLinear]]:
    """(path, layer) of every BlockSparseLinear of the model, a shared one under each of its paths."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, BlockSparseLinear):
            yield path, module
