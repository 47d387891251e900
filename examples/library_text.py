"""English text that every Python has: the docstrings and comments of its standard library, read where they lie.

Copyright Python Software Foundation, PSF License Version 2: https://docs.python.org/3/license.html.
"""

from __future__ import annotations

import ast
import io
import os
import random
import re
import tokenize
from pathlib import Path


def module_paths() -> list[Path]:
    """The library's Python files, without its tests, in an order that is random and always the same."""
    library = Path(os.__file__).parent
    paths = sorted(path for path in library.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts))
    random.Random(0).shuffle(paths)
    return paths


def docstrings(path: Path) -> list[str]:
    """A file's docstrings; none if it cannot be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]


def comments(path: Path) -> list[str]:
    """A file's comments, those of neighbouring lines joined; none if it cannot be read."""
    found: list[str] = []
    last = -1
    try:
        for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline):
            if token.type == tokenize.COMMENT:
                text, line = token.string.lstrip("#").strip(), token.start[0]
                if found and line == last + 1:
                    found[-1] += "\n" + text
                else:
                    found.append(text)
                last = line
    except (SyntaxError, tokenize.TokenError, ValueError):
        return []
    return found


def sentences(texts: list[str]) -> set[str]:
    """The natural sentences in them: plain words and punctuation only, which leaves out code, arguments and tables."""
    paragraphs = [" ".join(text.split()) for whole in texts for text in whole.split("\n\n")]
    found = (text for paragraph in paragraphs for text in re.split(r"(?<=[.!?]) +(?=[A-Z])", paragraph))
    return {text for text in found if re.fullmatch(r"[A-Z][A-Za-z ,;'-]{30,200}[.!?]", text) and text.count(" ") > 5}


def split_sentences(held_out: int, training: int | None = None, per_module: int = 20) -> tuple[list[str], list[str]]:
    """(held-out sentences, training sentences): none is in both, and no module gives to both.

    Args:
        held_out: sentences of docstrings, at most 20 of a module.
        training: sentences of docstrings and comments; None: all there are.
        per_module: at most so many training sentences of a module.

    Raises:
        SystemExit: there are not enough.
    """
    chance = random.Random(0)
    seen: set[str] = set()
    lists: tuple[list[str], list[str]] = ([], [])
    for path in module_paths():
        if len(lists[1]) == training:
            break
        evaluated = len(lists[0]) < held_out
        new = sorted(sentences(docstrings(path) + ([] if evaluated else comments(path))) - seen)
        seen.update(new)
        chosen = chance.sample(new, min(20 if evaluated else per_module, len(new)))
        target, wanted = (lists[0], held_out) if evaluated else (lists[1], training)
        target += chosen if wanted is None else chosen[: wanted - len(target)]
    if len(lists[0]) < held_out or len(lists[1]) < (training or 1):
        raise SystemExit(f"argument --sentences: the library has only {len(lists[0])} and {len(lists[1])} sentences")
    return lists
