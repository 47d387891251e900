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


def sentences(texts: list[str], plain: bool) -> set[str]:
    """The natural sentences in them, without code and tables.

    Args:
        texts: docstrings or comments.
        plain: words and ordinary punctuation alone, of 32 to 202 characters; else most of it has to be letters.
    """
    paragraphs = [" ".join(text.split()) for whole in texts for text in whole.split("\n\n")]
    found = {text for paragraph in paragraphs for text in re.split(r"(?<=[.!?]) +(?=[A-Z])", paragraph)}
    if plain:
        return {
            text for text in found if re.fullmatch(r"[A-Z][A-Za-z ,;'-]{30,200}[.!?]", text) and text.count(" ") > 5
        }
    return {text for text in found if re.fullmatch(r"[A-Z].{24,249}", text) and text.count(" ") > 3 and _letters(text)}


def _letters(text: str) -> bool:
    return sum(character.isalpha() or character == " " for character in text) > 0.85 * len(text)


def split_sentences(held_out: int, training: int | None = None) -> tuple[list[str], list[str]]:
    """(held-out sentences, training sentences): none is in both, and no module gives to both.

    Args:
        held_out: plain sentences of docstrings, at most 20 of a module.
        training: sentences of docstrings and comments, any of the library; None: all there are.

    Raises:
        SystemExit: there are not enough.
    """
    chance = random.Random(0)
    evaluation: list[str] = []
    others: set[str] = set()
    for path in module_paths():
        if len(evaluation) < held_out:
            new = sorted(sentences(docstrings(path), plain=True) - set(evaluation))
            evaluation += chance.sample(new, min(20, len(new), held_out - len(evaluation)))
        else:
            others |= sentences(docstrings(path) + comments(path), plain=False)
    found = sorted(others - set(evaluation))
    if len(evaluation) < held_out or len(found) < (training or 1):
        raise SystemExit(f"argument --sentences: the library has only {len(evaluation)} and {len(found)} sentences")
    return evaluation, found if training is None else sorted(chance.sample(found, training))
