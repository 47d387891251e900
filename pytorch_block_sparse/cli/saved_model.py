"""What a saved model holds, for ``info DIR``: read from the files' descriptions and headers, no model is built."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..checkpoint_file import open_model
from ..checkpoint_format import DESCRIPTION_FILE
from ..errors import BlockSparseError
from ..layer_record import LayerRecord
from ..pretrained_config import QUANT_METHOD, records_of_config
from ..text import table

_COORDINATE_BYTES = 2 * 4  # a block's row and column, int32


def collect(path: str) -> dict[str, Any]:
    """The facts, ready for JSON.

    Args:
        path: a directory that :func:`save_sparse` or transformers' ``save_pretrained`` has written, or the first one's
            ``.safetensors`` file.

    Raises:
        BlockSparseError: it is none, or damaged.
    """
    directory = Path(path)
    if (directory / "config.json").is_file() and not (directory / DESCRIPTION_FILE).exists():
        return _pretrained(directory)
    with open_model(directory) as saved:
        names = [*saved.names(), *saved.description.non_persistent]
        of_layers = {
            record.tensor_name(name)
            for record in saved.description.layers
            for name in ("values", "block_coords", "bias")
        }
        dense = {saved.source(name) for name in names if name not in of_layers}
        return {
            "format": "save_sparse",
            "file": str(saved.path),
            "file_bytes": saved.nbytes(),
            "layers": [_layer(record) for record in saved.description.layers],
            "dense": {
                "tensors": len(dense),
                "elements": sum(math.prod(saved.shape(name)) for name in dense),
                "bytes": sum(math.prod(saved.shape(name)) * saved.dtype(name).itemsize for name in dense),
            },
            "tied": saved.description.aliases,
        }


def _pretrained(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")).get("quantization_config") or {}
        if config.get("quant_method") != QUANT_METHOD:
            raise BlockSparseError(f"the model has no block-sparse layers (quant_method is not {QUANT_METHOD!r})")
        records = records_of_config(config)
    except (ValueError, AttributeError) as error:  # BlockSparseError is a ValueError
        raise BlockSparseError(f"{path}: {error}") from None
    return {
        "format": "save_pretrained",
        "file": str(path),
        "file_bytes": sum(file.stat().st_size for file in directory.glob("*.safetensors")),
        "layers": [_layer(record) for record in records],
    }


def _layer(record: LayerRecord) -> dict[str, Any]:
    block_bytes = math.prod(record.block_shape) * record.torch_dtype.itemsize + _COORDINATE_BYTES
    return {**record.to_json(), "density": record.density, "bytes": record.nnz * block_bytes}


def render(facts: dict[str, Any]) -> str:
    """The facts as text."""
    layers = facts["layers"]
    rows = [
        [
            layer["path"] or "(the model)",
            "x".join(map(str, layer["shape"])),
            "x".join(map(str, layer["block_shape"])),
            f"{layer['nnz']}",
            f"{layer['density']:.3f}",
            layer["dtype"],
            "yes" if layer["bias"] else "no",
            layer["activation"] or "-",
            f"{layer['bytes'] / 1e6:.3f}",
        ]
        for layer in layers
    ]
    dense = sum(math.prod(layer["shape"]) for layer in layers)
    kept = sum(layer["density"] * math.prod(layer["shape"]) for layer in layers)
    lines = [
        f"{facts['file']}, saved by {facts['format']}, tensors {facts['file_bytes'] / 1e6:.3f} MB",
        "",
        table(["layer", "out x in", "block", "blocks", "density", "dtype", "bias", "activation", "MB"], rows),
        "",
        f"{len(layers)} block-sparse layers: {sum(layer['bytes'] for layer in layers) / 1e6:.3f} MB of blocks"
        + (f", density {kept / dense:.3f} of {dense} weights" if dense else ""),
    ]
    if "dense" in facts:
        lines.append(
            f"{facts['dense']['tensors']} other tensors: {facts['dense']['elements']} elements, "
            f"{facts['dense']['bytes'] / 1e6:.3f} MB"
        )
        lines += [f"  {name} is tied to {target}" for name, target in facts["tied"].items()]
    return "\n".join(lines)
