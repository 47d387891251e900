"""Makes a saved transformers model block sparse, and saves it with save_sparse.

With --calibration, a text file with a passage on each line, the blocks are chosen and refitted so that the layers'
outputs on that text change least. A few hundred passages like those that the model will read are enough."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import BlockSparseError
from ..optional import require
from ..sparsify import sparsify
from ..sparsify.allocation import ALLOCATIONS
from ..sparsify.importance import IMPORTANCE
from ..text import progress
from . import environment

SUMMARY = "make a saved transformers model block sparse"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``sparsify``."""
    add = parser.add_argument
    add("model", metavar="MODEL_DIR", type=Path, help="folder of a transformers model, with its tokenizer")
    add(
        "output", metavar="OUT_DIR", type=Path, help="folder to save to: see save_sparse; config and tokenizer go along"
    )
    add("--density", type=float, default=0.5, help="share of the blocks to keep (default: 0.5)")
    add("--block", type=int, default=32, help="side of a square block (default: 32)")
    add("--calibration", type=Path, metavar="TEXT", help="text file, a passage on each line")
    add("--passages", type=int, default=512, help="of the text, evenly spread (default: 512)")
    add("--max-tokens", type=int, default=128, help="of a passage (default: 128)")
    add("--batch", type=int, default=16, help="passages run together (default: 16)")
    add("--importance", choices=sorted(IMPORTANCE), help="(default: obs with --calibration, else magnitude)")
    add("--allocation", choices=ALLOCATIONS, default="uniform", help="how layers share the blocks (default: uniform)")
    add("--include", action="append", metavar="REGEX", help="convert only layers of these names; repeatable")
    add("--exclude", action="append", metavar="REGEX", help="leave layers of these names dense; repeatable")
    add(
        "--fuse-activation",
        action="store_true",
        help="have layers compute the activation that follows, where it is safe",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--plot", type=Path, metavar="IMAGE", help="draw block maps, densities and errors to this file")


def run(options: argparse.Namespace) -> int:
    """Sparsifies, saves, and prints the report."""
    device = environment.pick_device(options.device)
    if not (options.model / "config.json").is_file():
        raise BlockSparseError(f"argument MODEL_DIR: must hold a config.json, got {options.model}")
    if options.output.exists() and not options.output.is_dir():
        raise BlockSparseError(f"argument OUT_DIR: must be a folder, got the file {options.output}")
    for name in ("block", "passages", "max_tokens", "batch"):
        if getattr(options, name) < 1:
            raise BlockSparseError(
                f"argument --{name.replace('_', '-')}: must be a positive integer, got {getattr(options, name)}"
            )
    from ..checkpoint import save_sparse

    passages = _read_passages(options.calibration, options.passages)
    transformers = require("transformers", "transformers")
    model = _load(transformers, options.model).to(device)
    tokenizer = _tokenizer(transformers, options.model, needed=passages is not None)
    batches = None
    if passages is not None:
        batches = _tokenize(tokenizer, passages, options.batch, options.max_tokens, model)
    report = sparsify(
        model,
        options.density,
        block_shape=(options.block, options.block),
        include=options.include,
        exclude=options.exclude,
        importance=options.importance or ("magnitude" if batches is None else "obs"),
        allocation=options.allocation,
        calibration=batches,
        fuse_activation=options.fuse_activation,
        progress=True,
    )
    save_sparse(model, options.output)
    model.config.save_pretrained(options.output)
    if tokenizer is not None:
        tokenizer.save_pretrained(options.output)
    (options.output / "sparsify.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    if options.plot is not None:
        report.plot(options.plot)
    print(report)
    print(
        f"\nsaved to {options.output}; load_sparse({str(options.output)!r}, model) loads it into a model of this class"
    )
    return 0


def _read_passages(path: Path | None, count: int) -> list[str] | None:
    """``count`` lines of a text file, evenly spread over it; blank ones do not count."""
    if path is None:
        return None
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BlockSparseError(f"argument --calibration: must be a readable text file, got {path}: {error}") from None
    lines = [line for line in lines if line]
    if not lines:
        raise BlockSparseError(f"argument --calibration: must hold a passage, got the empty file {path}")
    count = min(count, len(lines))
    return [lines[place * len(lines) // count] for place in range(count)]


def _load(transformers: Any, folder: Path) -> nn.Module:
    """The model, of the class that it was saved from."""
    config = transformers.AutoConfig.from_pretrained(folder)
    names = config.architectures or []
    model_class = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    return (model_class or transformers.AutoModel).from_pretrained(folder).eval()


def _tokenizer(transformers: Any, folder: Path, needed: bool) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        if needed:
            raise BlockSparseError(f"argument --calibration: needs a tokenizer in {folder}: {error}") from None
        return None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _tokenize(
    tokenizer: Any, passages: list[str], size: int, max_tokens: int, model: nn.Module
) -> list[dict[str, torch.Tensor]]:
    """Batches of passages of similar length, so that little is padding."""
    limit = min(max_tokens, getattr(model.config, "max_position_embeddings", None) or max_tokens)
    ordered = sorted(passages, key=len)
    batches = []
    with progress(len(ordered), desc="tokenize", unit="passage", leave=False, disable=None) as bar:
        for start in range(0, len(ordered), size):
            chunk = ordered[start : start + size]
            tokens = tokenizer(chunk, padding=True, truncation=True, max_length=limit, return_tensors="pt")
            batches.append(dict(tokens))
            bar.update(len(chunk))
    return batches
