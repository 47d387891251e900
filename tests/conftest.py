"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

# OpenMP threads that spin while they wait make a suite of small tensors many times slower on a busy machine; read when
# PyTorch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What cuBLAS needs under torch.use_deterministic_algorithms(); read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import hypothesis
import pytest
import torch

from pytorch_block_sparse import backends

# The same examples in every run: a failure is the code's, never the draw's.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device that the operator and module tests run on (default: cpu)")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills every new uninitialised tensor with NaN, those of native code too, so that an unwritten output shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def kernels_on_blocks() -> Iterator[None]:
    """No product is densified: what is tested are our own kernels."""
    with backends.densify_plan("never"):
        yield


@pytest.fixture
def set_threads() -> Iterator:
    """``torch.set_num_threads``, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code from other tests."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
