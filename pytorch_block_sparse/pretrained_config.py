"""The block-sparse part of a transformers ``config.json``: which layers are sparse, and how they are named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .errors import BlockSparseError
from .layer_record import LayerRecord, records_from_json

QUANT_METHOD = "block_sparse"
VERSION = 1


def config_of_records(records: Iterable[LayerRecord]) -> dict[str, Any]:
    """The ``quantization_config`` of layers, ready for JSON."""
    return {"quant_method": QUANT_METHOD, "version": VERSION, "layers": [record.to_json() for record in records]}


def records_of_config(config: Mapping[str, Any]) -> tuple[LayerRecord, ...]:
    """The layers of a ``quantization_config``.

    Raises:
        BlockSparseError: it is of another version, or damaged.
    """
    if config.get("version") != VERSION or isinstance(config.get("version"), bool):
        raise BlockSparseError(f"quantization_config: version must be {VERSION}, got {config.get('version')!r:.80}")
    try:
        return records_from_json(config.get("layers"))
    except BlockSparseError as error:
        raise BlockSparseError(f"quantization_config: {error}") from None
