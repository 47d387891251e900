"""The JSON description of a saved model: what it holds, and how it is checked when it comes back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .errors import BlockSparseError
from .layer_record import LayerRecord, records_from_json

FORMAT = "pytorch_block_sparse"
VERSION = 1
DESCRIPTION_FILE = "block_sparse.json"
TENSORS_PREFIX, TENSORS_SUFFIX = "block_sparse-", ".safetensors"

_FIELDS = ("format", "version", "tensors", "layers", "aliases", "non_persistent")


@dataclass(frozen=True)
class Description:
    """What a saved model holds.

    Attributes:
        tensors: name of the safetensors file, beside the description.
        layers: the BlockSparseLinear layers.
        aliases: {name: the name under which the same tensor is stored}, for tied tensors.
        non_persistent: names of stored buffers that are not in the model's state dict.
    """

    tensors: str
    layers: tuple[LayerRecord, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    non_persistent: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Description:
        """The description of a JSON document.

        Raises:
            BlockSparseError: it is no such document, of another version, or damaged.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BlockSparseError(f"not JSON: {error}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise BlockSparseError(f"not a model saved by save_sparse: format must be {FORMAT!r}")
        if document.get("version") != VERSION or isinstance(document["version"], bool):
            raise BlockSparseError(f"version must be {VERSION}, got {document.get('version')!r:.80}")
        if set(document) != set(_FIELDS):
            raise BlockSparseError(f"the fields must be {', '.join(_FIELDS)}, got {', '.join(sorted(document))}")
        tensors, aliases, non_persistent = (document[name] for name in ("tensors", "aliases", "non_persistent"))
        if not isinstance(tensors, str) or not _is_tensors_file(tensors):
            # A bare name: a description must not lead out of its directory.
            raise BlockSparseError(f"tensors must be {TENSORS_PREFIX}*{TENSORS_SUFFIX}, got {tensors!r:.200}")
        if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
            raise BlockSparseError("aliases must be an object of strings")
        if not isinstance(non_persistent, list) or not all(isinstance(name, str) for name in non_persistent):
            raise BlockSparseError("non_persistent must be a list of strings")
        return cls(tensors, records_from_json(document["layers"]), dict(aliases), tuple(non_persistent))

    def to_json(self) -> str:
        """The JSON document, indented for people."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "tensors": self.tensors,
            "layers": [record.to_json() for record in self.layers],
            "aliases": self.aliases,
            "non_persistent": list(self.non_persistent),
        }
        return json.dumps(document, indent=1) + "\n"


def _is_tensors_file(name: str) -> bool:
    return name.startswith(TENSORS_PREFIX) and name.endswith(TENSORS_SUFFIX) and "/" not in name and "\\" not in name
