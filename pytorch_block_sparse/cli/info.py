"""Shows versions, the back ends that were built (and why not), and the kernels that serve this machine.

With DIR: what a saved model holds (of save_sparse, or of transformers' save_pretrained)."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any

import torch

from ..native import block_sparse_native
from . import environment, saved_model

SUMMARY = "versions, back ends, kernels; or what a saved model holds"

# native/cpu/isa_*.cpp
_VECTOR_BYTES = {"avx512_bf16": 64, "avx512": 64, "avx2": 32, "portable": 16}
_BFLOAT16 = {
    "brgemm": "oneDNN brgemm on the processor's matrix units",
    "pairs": "register tiles of float32, two products at a time (AVX512_BF16)",
    "float32": "converted to float32",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``info``."""
    parser.add_argument("directory", metavar="DIR", nargs="?", help="a saved model: its directory or .safetensors file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Prints the facts."""
    if options.directory is None:
        facts = collect()
        text = render(facts)
    else:
        facts = saved_model.collect(options.directory)
        text = saved_model.render(facts)
    print(json.dumps(facts, indent=2) if options.json else text)
    return 0


def collect() -> dict[str, Any]:
    """The facts, ready for JSON."""
    return {
        "versions": {
            "pytorch_block_sparse": environment.package_version(),
            "commit": environment.git_commit(),
            "torch": torch.__version__,
            "torch CUDA": torch.version.cuda,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "cpu": {
            "built": True,
            "processor": environment.cpu_model(),
            "capability": block_sparse_native.cpu_capability(),
            "threads_requested": torch.get_num_threads(),
            "threads_running": block_sparse_native.cpu_threads(),
            "bfloat16": block_sparse_native.cpu_bfloat16_arithmetic(),
        },
        "cuda": _cuda(),
        "plans": {"cpu": cpu_plans(), "cuda": cuda_plans()},
    }


def _cuda() -> dict[str, Any]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "architecture": f"sm_{properties.major}{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return {
        "built": block_sparse_native.with_cuda,
        "missing": environment.cuda_missing(),
        "gpus": gpus,
        "densify_plan": block_sparse_native.densify_mode(),
    }


def cpu_plans() -> list[dict[str, str]]:
    """Which kernel serves which dtype and block here."""
    capability = block_sparse_native.cpu_capability()
    vector_bytes = _VECTOR_BYTES.get(capability, 16)
    plans = []
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        sums = "float64" if dtype == "float64" else "float32"
        lanes = vector_bytes // (8 if sums == "float64" else 4)
        kernel = f"{capability} register tiles of {sums}"
        if dtype == "bfloat16" and block_sparse_native.cpu_bfloat16_arithmetic() != "float32":
            kernel = _BFLOAT16[block_sparse_native.cpu_bfloat16_arithmetic()]
        elif dtype != sums:
            kernel += f", {dtype} converted while packing"
        plans += [
            {"dtype": dtype, "blocks": "16, 32, 64, 128", "kernel": kernel},
            {"dtype": dtype, "blocks": "any other", "kernel": f"the same, sides padded to multiples of {lanes}"},
        ]
    return plans


def cuda_plans() -> list[dict[str, str]]:
    """Which kernel serves which dtype and block on the current GPU: tokens or features x features of a tile."""
    if environment.cuda_missing():
        return []
    return [
        {"dtype": dtype, "blocks": blocks, "kernel": kernel}
        for dtype, blocks, kernel in block_sparse_native.cuda_plans()
    ]


def render(facts: dict[str, Any]) -> str:
    """The facts as text."""
    lines = [f"{name:22}{'none' if value is None else value}" for name, value in facts["versions"].items()]
    cpu = facts["cpu"]
    lines += [
        "",
        f"CPU back end          built; {cpu['capability']} kernels on {cpu['processor']}",
        f"  threads             {cpu['threads_requested']} requested, {cpu['threads_running']} running "
        f"({os.cpu_count()} cores)",
        f"  bfloat16            {_BFLOAT16[cpu['bfloat16']]}",
    ]
    lines += [f"  {plan['dtype']:10}{plan['blocks']:18}{plan['kernel']}" for plan in facts["plans"]["cpu"]]
    cuda = facts["cuda"]
    state = "built" if cuda["built"] else "not built"
    lines += ["", f"CUDA back end         {state}" + (f": {cuda['missing']}" if cuda["missing"] else "")]
    lines += [f"  {gpu['name']}, {gpu['architecture']}, {gpu['memory_gib']} GiB" for gpu in cuda["gpus"]]
    if not cuda["gpus"]:
        lines.append("  GPUs visible        none")
    if facts["plans"]["cuda"]:
        lines.append(f"  densify plan        {cuda['densify_plan']} (BLOCK_SPARSE_DENSIFY)")
        lines.append("  tiles               tokens x features; weight gradient: features x features")
    lines += [f"  {plan['dtype']:10}{plan['blocks']:18}{plan['kernel']}" for plan in facts["plans"]["cuda"]]
    return "\n".join(lines)
