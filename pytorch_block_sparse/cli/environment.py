"""What this installation and this machine are: facts for ``info`` and for every result file."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..errors import BlockSparseError
from ..native import block_sparse_native


def cuda_missing() -> str | None:
    """Why our CUDA kernels cannot run here, or None if they can."""
    if torch.version.cuda is None:
        return "this PyTorch is a CPU build (torch.version.cuda is None)"
    if not block_sparse_native.with_cuda:
        return "pytorch_block_sparse was built without nvcc; put it on the PATH and install again"
    if not torch.cuda.is_available():
        return "no GPU is visible to PyTorch"
    return None


def pick_device(name: str, argument: str = "--device") -> torch.device:
    """The device of a ``--device`` argument.

    Args:
        name: "auto" (the GPU if our kernels can use one), "cpu" or "cuda".
        argument: what the error message calls it.

    Raises:
        BlockSparseError: "cuda" was asked for and cannot be had.
    """
    missing = cuda_missing()
    if name == "auto":
        name = "cpu" if missing else "cuda"
    if name == "cuda" and missing:
        raise BlockSparseError(f"argument {argument}: cuda is not available: {missing}")
    return torch.device(name)


def package_version() -> str:
    """Of the installed package, or of the source tree."""
    from .. import __version__

    return __version__


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of the source tree, with "+changes" if it differs; None where the package is not run from one."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        completed = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return completed.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an unrelated repository around .venv does not count
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def describe(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """What a result file says of where it was measured; ``commit`` instead of what git says."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "package": package_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device.type,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "capability": block_sparse_native.cpu_capability(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        facts.update(
            gpu=torch.cuda.get_device_name(device),
            cuda=torch.version.cuda,
            architecture=f"sm_{major}{minor}",
            cuda_path=block_sparse_native.cuda_path(),
            densify_plan=block_sparse_native.densify_mode(),
        )
    return facts
