"""The sdist and the wheel hold what they need and nothing else, and the installed wheel computes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "pytorch_block_sparse"

COMPUTE = f"""
import sys, torch, {PACKAGE}
assert {PACKAGE}.__file__.startswith(sys.argv[1]), {PACKAGE}.__file__
torch.manual_seed(0)
layer = {PACKAGE}.BlockSparseLinear(100, 130, block_shape=(16, 32), activation="gelu")
x = torch.randn(3, 7, 100, requires_grad=True)
layer(x).square().sum().backward()
weight = layer.weight.to_dense().detach().requires_grad_()
torch.testing.assert_close(
    torch.autograd.grad(torch.nn.functional.gelu(x @ weight.t() + layer.bias).square().sum(), x)[0], x.grad,
    rtol=1e-4, atol=1e-4)
print("version", {PACKAGE}.__version__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    report = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    assert report.returncode == 0, (report.stdout + report.stderr)[-6000:]
    return report.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """A folder with the sdist of a clean copy, and the wheel that was built from that sdist alone."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(
        ROOT,
        folder / "source",
        ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__", "output"),
    )
    shutil.copy(ROOT / ".clang-format", folder / "source")
    shutil.copytree(ROOT / ".ci", folder / "source" / ".ci")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "source")
    return folder / "dist"


@pytest.fixture(scope="module")
def sdist_names(distributions) -> set[str]:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


@pytest.fixture(scope="module")
def wheel_names(distributions) -> set[str]:
    (path,) = distributions.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def files(folder: str, *suffixes: str) -> set[str]:
    paths = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ROOT)) for path in paths if path.suffix in suffixes}


@pytest.mark.parametrize("folder", [f"{PACKAGE}/native", "cutlass"])
def test_sdist_holds_the_native_sources(folder, sdist_names):
    assert files(folder, ".cpp", ".h", ".hpp", ".cu", ".cuh") <= sdist_names


@pytest.mark.parametrize("folder", [PACKAGE, "tests", "examples", "benchmarks"])
def test_sdist_holds_the_python_files(folder, sdist_names):
    assert files(folder, ".py") <= sdist_names


@pytest.mark.parametrize(
    "name",
    [
        "LICENSE",
        "README.md",
        "DevNotes.md",
        "CHANGELOG.md",
        "Makefile",
        "setup.py",
        "pyproject.toml",
        ".ci/run",
        f"{PACKAGE}/py.typed",
    ],
)
def test_sdist_holds(name, sdist_names):
    assert name in sdist_names


def test_sdist_holds_nothing_that_was_built(sdist_names):
    junk = {
        name for name in sdist_names if name.endswith((".so", ".o", ".pyc")) or name.startswith(("build/", "dist/"))
    }
    assert junk == set()


def test_wheel_holds_the_modules_and_the_extension(wheel_names):
    assert files(PACKAGE, ".py") <= wheel_names
    assert f"{PACKAGE}/py.typed" in wheel_names
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
    extensions = [name for name in wheel_names if name.endswith(".so")]
    assert len(extensions) == 1 and extensions[0].startswith(f"{PACKAGE}/native/block_sparse_native.")


def test_wheel_holds_nothing_else(wheel_names):
    expected = (".py", ".so", f"{PACKAGE}/py.typed")
    strangers = {
        name
        for name in wheel_names
        if not (name.startswith(f"{PACKAGE}/") and name.endswith(expected)) and ".dist-info/" not in name
    }
    assert strangers == set()


def test_installed_wheel_computes(distributions, tmp_path):
    (wheel,) = distributions.glob("*.whl")
    target = tmp_path / "site"
    run(
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel, cwd=tmp_path
    )
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n{COMPUTE}"
    assert "version 1." in run(sys.executable, "-c", code, target, cwd=tmp_path)
