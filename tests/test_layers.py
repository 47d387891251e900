"""Import and include arrows go downwards only (DESIGN.md, "Layers and files"). The rules are data."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pytorch_block_sparse"

# A module or subpackage imports from the lines above its own, never from its own line or below. Every one has a line.
PYTHON_LAYERS = (
    {"errors"},
    {"checks", "dense_layers", "dense_origin", "main_grad", "optional", "text"},
    {"pattern_index", "plotting"},
    {"pattern"},
    {"pattern_input", "blocks", "reference", "native"},
    {"backends", "ops", "state_dicts", "array_interop"},
    {"block_sparse"},
    {"block_sparse_linear"},
    {"sparsify"},
    {"layer_record"},
    {"layer_replacement", "checkpoint_format", "pretrained_config"},
    {"checkpoint_file", "masked_models"},
    {"checkpoint_plan"},
    {"checkpoint", "hf"},
    {"training"},
    {"__init__"},
    {"cli"},
    {"__main__"},
)
# The compiled module has one door for computing and one for settings; the command line asks it about the build.
IMPORTERS_OF_NATIVE = {"backends", "ops", "cli"}
# Below the command line nothing but PyTorch is needed to import the package.
THIRD_PARTY = {"torch"}
FREE_OF_THIRD_PARTY_RULE = {"cli", "__main__"}

ONCE_FOR_EACH_ISA = "compiled once for each instruction set, so without inline functions of others"
TORCH = r"torch/|ATen/|c10/|pybind11/|Python\.h"
# (files below the root, includes that they must not have, why)
INCLUDE_RULES = (
    ("cutlass/**/*", TORCH, "device templates know no torch"),
    (
        "cutlass/**/*",
        r"native/|problem\.h|packed_index\.h|operators\.h|dispatch\.h|cpu/",
        "device templates know no native/",
    ),
    ("pytorch_block_sparse/native/**/*.cu", TORCH, "launchers include no torch header, so that nvcc is quick"),
    ("pytorch_block_sparse/native/**/*.cuh", TORCH, "launchers include no torch header, so that nvcc is quick"),
    ("pytorch_block_sparse/native/*_launch.h", TORCH, "launchers include no torch header, so that nvcc is quick"),
    ("pytorch_block_sparse/native/problem.h", TORCH, "shared with the launchers"),
    ("pytorch_block_sparse/native/packed_index.h", TORCH, "shared with the launchers"),
    ("pytorch_block_sparse/native/densify_plan.*", TORCH, "plans are chosen without torch"),
    ("pytorch_block_sparse/native/plan_record.*", TORCH, "plans are chosen without torch"),
    ("pytorch_block_sparse/native/product.*", TORCH, "plans are chosen without torch"),
    (
        "pytorch_block_sparse/native/cpu/*",
        r"torch/|pybind11/|Python\.h|ATen/(?!Parallel\.h|native/CPUBlas\.h)",
        "kernels see no tensor",
    ),
    ("pytorch_block_sparse/native/cpu/*", r"operators\.h|gemm/", "kernels know neither the dispatcher nor CUDA"),
    ("pytorch_block_sparse/native/cpu/*.h", TORCH, ONCE_FOR_EACH_ISA),
    ("pytorch_block_sparse/native/cpu/isa_*.cpp", TORCH, ONCE_FOR_EACH_ISA),
    (
        "pytorch_block_sparse/native/auto*.cpp",
        r"cpu/|gemm/|problem\.h",
        "autograd and autocast call operators, never kernels",
    ),
    ("pytorch_block_sparse/native/**/*", r"benchmarks/|tests/", "the library needs no tool"),
)
SOURCE_SUFFIXES = {".h", ".hpp", ".cuh", ".cpp", ".cu"}

RANK = {name: rank for rank, names in enumerate(PYTHON_LAYERS) for name in names}


def modules() -> Iterator[tuple[str, Path]]:
    """(top-level module of the package, file) for each of its files."""
    for path in sorted(PACKAGE.rglob("*.py")):
        first = path.relative_to(PACKAGE).parts[0]
        yield first.removesuffix(".py"), path


def imports(source: str, parts: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """(top-level module, whether it is the package's own) for each import of a file at ``parts`` below the package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                own = first == PACKAGE.name
                yield (rest.split(".")[0] or "__init__" if own else first), own
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            first, _, rest = node.module.partition(".")
            if first != PACKAGE.name:
                yield first, False
            elif rest:
                yield rest.split(".")[0], True
            else:
                yield from ((alias.name if alias.name in RANK else "__init__", True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = parts[: len(parts) - node.level]
            target = [*folder, *(node.module.split(".") if node.module else [])]
            if target:
                yield target[0], True
            else:
                yield from ((alias.name if alias.name in RANK else "__init__", True) for alias in node.names)


def bad_imports(module: str, source: str, parts: tuple[str, ...]) -> list[str]:
    bad = []
    for target, own in imports(source, parts):
        if not own:
            if module not in FREE_OF_THIRD_PARTY_RULE and target not in sys.stdlib_module_names | THIRD_PARTY:
                bad.append(f"{module} imports {target}")
        elif target != module or len(parts) == 1:
            if RANK.get(target, len(RANK)) >= RANK[module]:
                bad.append(f"{module} imports {target}, which is not below it")
            elif target == "native" and module not in IMPORTERS_OF_NATIVE:
                bad.append(f"{module} imports native")
    return bad


def includes(source: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source, re.MULTILINE)


def source_files(pattern: str) -> list[Path]:
    return [path for path in sorted(ROOT.glob(pattern)) if path.suffix in SOURCE_SUFFIXES]


@pytest.mark.parametrize(
    ("module", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else value.name
)
def test_python_imports_go_downwards(module, path):
    assert module in RANK, f"give {module} a line in PYTHON_LAYERS"
    assert bad_imports(module, path.read_text(), path.relative_to(PACKAGE).parts) == []


@pytest.mark.parametrize(
    ("module", "parts", "source"),
    [
        ("pattern", ("pattern.py",), "from . import ops"),
        ("pattern", ("pattern.py",), "from .native import block_sparse_native"),
        ("pattern", ("pattern.py",), "def f():\n    from pytorch_block_sparse.ops import linear"),
        ("pattern", ("pattern.py",), "import pytorch_block_sparse.blocks"),
        ("pattern", ("pattern.py",), "import numpy as np"),
        ("ops", ("ops.py",), "from .block_sparse import BlockSparseMatrix"),
        ("ops", ("ops.py",), "from . import BlockSparseLinear"),
        ("state_dicts", ("state_dicts.py",), "from .ops import linear"),
        ("blocks", ("blocks.py",), "from . import native"),
        ("block_sparse", ("block_sparse.py",), "from .cli import main"),
        ("native", ("native", "__init__.py"), "from ..ops import linear"),
    ],
)
def test_the_import_rules_notice(module, parts, source):
    assert len(bad_imports(module, source, parts)) == 1


@pytest.mark.parametrize(("pattern", "forbidden", "why"), INCLUDE_RULES, ids=lambda value: value)
def test_includes_go_downwards(pattern, forbidden, why):
    bad = [
        f"{path.relative_to(ROOT)} includes {name}: {why}"
        for path in source_files(pattern)
        for name in includes(path.read_text())
        if re.search(f"(^|/)({forbidden})", name)
    ]
    assert bad == []


def test_include_rules_read_the_files_they_speak_of():
    found = {path.name for pattern, _, _ in INCLUDE_RULES for path in source_files(pattern)}
    assert {"problem.h", "packed_index.h", "autograd.cpp", "autocast.cpp", "cpu_kernels.h"} <= found
    text = '#include <torch/library.h>\n  # include "../problem.h"\n// #include <ATen/Tensor.h>\n'
    assert includes(text) == ["torch/library.h", "../problem.h"]


def test_quoted_includes_name_files_of_ours():
    """Each resolves beside its file or on our include path, so that no file of NVIDIA's or PyTorch's can shadow it."""
    native = PACKAGE / "native"
    sources = [
        path for folder in (native, ROOT / "cutlass") for path in folder.rglob("*") if path.suffix in SOURCE_SUFFIXES
    ]
    assert sources
    for path in sources:
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
            assert any((folder / name).is_file() for folder in (path.parent, native, ROOT / "cutlass")), (
                f"{path}: {name}"
            )
