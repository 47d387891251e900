"""Builds pytorch_block_sparse.native.block_sparse_native; everything else about the package is in pyproject.toml."""

import os
import platform
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
NATIVE = Path("pytorch_block_sparse/native")


def native_extension() -> CppExtension:
    # Relative paths: setuptools wants them, and an sdist then builds anywhere.
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / NATIVE).rglob("*.cpp"))
    # The CPU kernels choose their instruction set at run time, so there is no -march here. OpenMP is what makes
    # at::parallel_for parallel in an extension. It is not linked: the symbols then come from the runtime that PyTorch
    # has loaded. A second one's threads would fight the first's, which spin for a while after every parallel region.
    compile_flags = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas"]
    compile_flags += ["-Xpreprocessor", "-fopenmp"] if platform.system() == "Darwin" else ["-fopenmp"]
    return CppExtension(
        "pytorch_block_sparse.native.block_sparse_native",
        sources,
        include_dirs=[str(ROOT / NATIVE), str(ROOT / "cutlass")],
        extra_compile_args={"cxx": compile_flags},
        depends=[str(path) for folder in (NATIVE, Path("cutlass")) for path in sorted((ROOT / folder).rglob("*.h"))],
    )


os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))

setup(ext_modules=[native_extension()], cmdclass={"build_ext": BuildExtension})
