"""Where NVIDIA's CUTLASS headers are: for setup.py, and printed for the Makefile."""

import importlib.util
import os
from pathlib import Path


def cutlass_include() -> str:
    """CUTLASS_PATH (the repository or its include folder), or the nvidia-cutlass package."""
    candidates = []
    if path := os.environ.get("CUTLASS_PATH"):
        candidates += [Path(path) / "include", Path(path)]
    if (package := importlib.util.find_spec("cutlass_library")) and package.submodule_search_locations:
        candidates.append(Path(package.submodule_search_locations[0]) / "source" / "include")
    for candidate in candidates:
        if (candidate / "cute" / "tensor.hpp").exists():
            return str(candidate)
    raise SystemExit(
        "pytorch_block_sparse: the CUDA kernels need NVIDIA's CUTLASS headers (cute/tensor.hpp). Install them with "
        "`pip install nvidia-cutlass`, or set CUTLASS_PATH to a CUTLASS 4 checkout"
        + (f"; looked in {', '.join(map(str, candidates))}" if candidates else "")
    )


if __name__ == "__main__":
    print(cutlass_include())
