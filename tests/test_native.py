"""What Python and C++ must agree on, and what the build must have switched on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytorch_block_sparse.native import block_sparse_native
from pytorch_block_sparse.pattern_index import packed_index_size

size = st.integers(0, 2**31)


@given(rows=size, cols=size, nnz=size)
def test_packed_index_size_is_the_same_in_python_and_cpp(rows, cols, nnz):
    assert block_sparse_native.packed_index_size(rows, cols, nnz) == packed_index_size(rows, cols, nnz)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_parallel_region_runs_on_every_thread(threads, set_threads):
    """Without OpenMP at::parallel_for silently runs on one."""
    set_threads(threads)
    assert block_sparse_native.cpu_threads() == threads


def test_capability_is_the_best_of_this_machine_or_what_the_environment_allows():
    order = ("portable", "avx2", "avx512", "avx512_bf16")
    limit = os.environ.get("BLOCK_SPARSE_CPU_CAPABILITY", "avx512_bf16")
    machine = {"AVX2": "avx2", "AVX512": "avx512"}.get(torch.backends.cpu.get_cpu_capability(), "portable")
    found = block_sparse_native.cpu_capability()
    # PyTorch does not tell whether AVX-512 comes with its bfloat16 instructions.
    assert found.removesuffix("_bf16") == min(limit, machine, key=order.index).removesuffix("_bf16")
    assert order.index(found) <= order.index(limit)


# Everything that runs a kernel; the longest problems would only repeat what the rest shows.
KERNEL_TESTS = (
    "test_capability_is or (test_linear or test_input_grad or test_weight_grad or test_any_problem or test_long_sums "
    "or test_fused or test_strided or test_no_tokens) and not T300"
)


@pytest.mark.parametrize("capability", ["portable", "avx2", "avx512"])
def test_operators_on_a_lower_capability(capability):
    """The operator suite again: the choice is made once a process, so in a process of its own."""
    files = __file__, os.path.join(os.path.dirname(__file__), "test_operators.py")
    report = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", KERNEL_TESTS, *files],
        env={**os.environ, "BLOCK_SPARSE_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.returncode == 0, report.stdout[-4000:] + report.stderr[-2000:]


def test_a_build_for_cpu_pytorch_says_that_it_has_no_cuda():
    assert block_sparse_native.with_cuda is False or torch.version.cuda
