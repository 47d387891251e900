"""Builds pytorch_block_sparse.native.block_sparse_native; everything else about the package is in pyproject.toml."""

import os
import platform
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # pip does not put it there
from cutlass_include import cutlass_include  # noqa: E402

NATIVE = Path("pytorch_block_sparse/native")
# CUTLASS' element types need the half operators that PyTorch's build turns off.
HALF_OPERATORS = [f"-U__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS")]
# With a CUDA PyTorch and nvcc the CUDA kernels are built; `info` says which of the two was missing.
BUILDS_CUDA = torch.version.cuda is not None and CUDA_HOME is not None


def cuda_architectures() -> str:
    """The visible GPUs, else A100 and Hopper. Hopper's own instructions need the architecture-specific 9.0a."""
    visible = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    names = {"9.0a" if capability == (9, 0) else "{}.{}".format(*capability) for capability in visible}
    return ";".join(sorted(names)) or "8.0;9.0a"


def native_extension() -> Extension:
    # Relative paths: setuptools wants them, and an sdist then builds anywhere.
    patterns = ["*.cpp", "*.cu"] if BUILDS_CUDA else ["*.cpp"]
    sources = sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / NATIVE).rglob(pattern))
    # The CPU kernels choose their instruction set at run time, so there is no -march here. OpenMP is what makes
    # at::parallel_for parallel in an extension. It is not linked: the symbols then come from the runtime that PyTorch
    # has loaded. A second one's threads would fight the first's, which spin for a while after every parallel region.
    compile_flags = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas"]
    compile_flags += ["-Xpreprocessor", "-fopenmp"] if platform.system() == "Darwin" else ["-fopenmp"]
    include_dirs = [str(ROOT / NATIVE), str(ROOT / "cutlass")]
    compile_args = {"cxx": compile_flags}
    if BUILDS_CUDA:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", cuda_architectures())
        include_dirs.append(cutlass_include())
        compile_flags.append("-DBLOCK_SPARSE_WITH_CUDA")
        if "9.0a" in os.environ["TORCH_CUDA_ARCH_LIST"]:
            compile_flags.append("-DBLOCK_SPARSE_WITH_SM90A")
        else:
            sources = [source for source in sources if "_sm90" not in source]
        compile_args["nvcc"] = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", *HALF_OPERATORS]
    else:
        # Host code that only the CUDA build has.
        sources = [source for source in sources if not Path(source).name.startswith("cuda_")]
    return (CUDAExtension if BUILDS_CUDA else CppExtension)(
        "pytorch_block_sparse.native.block_sparse_native",
        sources,
        include_dirs=include_dirs,
        extra_compile_args=compile_args,
        depends=[str(path) for folder in (NATIVE, Path("cutlass")) for path in sorted((ROOT / folder).rglob("*.h"))],
    )


os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))

setup(ext_modules=[native_extension()], cmdclass={"build_ext": BuildExtension})
