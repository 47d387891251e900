"""When a GPU product is densified: predicted on the host, so tested without a GPU. And the setting."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from pytorch_block_sparse import BlockSparseError, backends
from pytorch_block_sparse.native import block_sparse_native

LARGE = (8192, 14336, 4096)  # T, O, I
OPERATORS = ("linear", "input_grad", "weight_grad")
A100, H200 = (8, 0), (9, 0)

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
HOST_US = 10  # that densifying must win for what it costs the host
DECODE_TOKENS = 64  # at most, for the kernel for few tokens

each_operator = pytest.mark.parametrize("operator", OPERATORS)


def choice(operator, block, density, shape=LARGE, dtype="bfloat16", **details):
    """(whether it densifies, predicted seconds on the blocks, predicted seconds densified)."""
    tokens, out_features, in_features = shape
    height, width = block if isinstance(block, tuple) else (block, block)
    nnz = round(density * -(-out_features // height) * -(-in_features // width))
    geometry = [out_features, in_features, height, width, nnz]
    return block_sparse_native.densify_choice(operator, dtype, geometry, tokens, **details)


def densifies(*arguments, **details):
    return choice(*arguments, **details)[0]


@each_operator
def test_small_blocks_at_high_density_are_densified(operator):
    assert densifies(operator, 16, 0.5, hopper=False) and densifies(operator, 16, 1.0, hopper=False)
    # Hopper's own kernels take as long as cuBLAS at density .5, and more where hardly a block is absent.
    assert not densifies(operator, 16, 0.5)
    assert densifies(operator, 16, 1.0) == (operator != "weight_grad")


@each_operator
@pytest.mark.parametrize("block", [64, 128, 256, (64, 192)])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.25, 0.5])
def test_hopper_kernels_keep_large_blocks(operator, block, density):
    assert not densifies(operator, block, density)


@each_operator
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("hopper", [True, False])
def test_low_density_is_never_densified(operator, block, hopper):
    assert not densifies(operator, block, 0.02, hopper=hopper)


@each_operator
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32", "float32", "float64"])
@pytest.mark.parametrize("gpu", [A100, H200], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_decode_is_never_densified(operator, dtype, gpu, tokens):
    hopper = gpu == H200 and dtype in ("bfloat16", "float16")
    for block in (16, 32, 64, 128, (7, 5)):
        for density in (0.1, 0.5, 1.0):
            shape = (tokens, *LARGE[1:])
            assert not densifies(operator, block, density, shape, dtype, hopper=hopper, compute_capability=gpu)


@each_operator
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("density", [0.1, 0.25, 0.5, 1.0])
def test_small_products_are_never_densified(operator, block, density):
    for shape in ((64, 256, 256), (256, 256, 256), (100, 192, 400)):
        assert not densifies(operator, block, density, shape)


@pytest.mark.parametrize("operator", ["linear", "weight_grad"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_copying_a_large_weight_does_not_pay_for_64_tokens(operator, block):
    assert not densifies(operator, block, 0.5, (64, *LARGE[1:]))


@pytest.mark.parametrize("gpu", [(8, 6), (8, 9), (10, 0), (12, 0), (13, 0)], ids=str)
def test_every_gpu_has_rates(gpu):
    assert densifies("linear", 16, 1.0, hopper=False, compute_capability=gpu)
    assert not densifies("linear", 128, 0.1, hopper=False, compute_capability=gpu)


@pytest.mark.parametrize("operator", ["linear", "input_grad"])
@pytest.mark.parametrize("block", [16, 32, 64, 128, (48, 16)])
@pytest.mark.parametrize("tokens", [1, 17, DECODE_TOKENS])
def test_few_tokens_cost_what_reading_the_blocks_takes(operator, block, tokens):
    densify, quarter, _ = choice(operator, block, 0.25, (tokens, *LARGE[1:]))
    _, half, dense = choice(operator, block, 0.5, (tokens, *LARGE[1:]))
    blocks_bytes = 0.25 * 2 * LARGE[1] * LARGE[2]
    assert not densify
    assert blocks_bytes / 4.8e12 < quarter < half < dense
    if tokens == 1:
        assert quarter < 15e-6


def test_scattering_pays_from_some_number_of_tokens_on():
    shapes = [(tokens, *LARGE[1:]) for tokens in (1, 64, 256, 1024, 4096, 16384)]
    chosen = [densifies("linear", 16, 0.5, shape, hopper=False) for shape in shapes]
    assert chosen == sorted(chosen) and not chosen[0] and chosen[-1]


@each_operator
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "tf32", "float32", "float64"])
def test_time_on_the_blocks_grows_with_density(operator, block, dtype):
    densities = (0.01, 0.05, 0.1, 0.17, 0.25, 0.4, 0.5, 0.75, 1.0)
    seconds = [choice(operator, block, density, dtype=dtype, hopper=False)[1] for density in densities]
    assert all(sparser < denser for sparser, denser in itertools.pairwise(seconds))


@pytest.mark.parametrize("path", ["sm90", "sm80"])
def test_choice_is_the_faster_plan_as_measured(path):
    """benchmarks/densify.py timed both plans; a cell in which cuBLAS itself was disturbed says nothing."""
    (name,) = RESULTS.glob(f"*_densify_{path}.json")
    rows = json.loads(name.read_text())["rows"]

    def product(row):
        return row["operator"], row["dtype"], *row["shape"]

    least_dense = {}
    for row in rows:
        least_dense[product(row)] = min(row["dense_us"], least_dense.get(product(row), row["dense_us"]))
    losses = []
    for row in rows:
        if row["dense_us"] > 1.5 * least_dense[product(row)]:
            continue
        tokens, in_features, out_features = row["shape"]
        shape = (tokens, out_features, in_features)
        chosen = densifies(row["operator"], row["block"], row["density"], shape, row["dtype"], hopper=path == "sm90")
        ours, best = row["densify_us" if chosen else "blocks_us"], min(row["blocks_us"], row["densify_us"])
        losses.append(ours / best if ours > best + HOST_US else 1.0)
    assert len(losses) > 200
    assert statistics.geometric_mean(losses) < 1.02
    assert sum(loss > 1.1 for loss in losses) < 0.1 * len(losses)


def test_blocks_without_a_tiled_kernel_are_densified_early():
    assert densifies("linear", (7, 5), 0.25, hopper=False)
    assert densifies("linear", 32, 0.25, dtype="float64", hopper=False)
    assert not densifies("linear", (7, 5), 0.25, (64, 256, 256), hopper=False)


def test_an_activation_after_the_product_counts():
    plain, with_gelu = choice("linear", 16, 0.5), choice("linear", 16, 0.5, activation="gelu")
    assert with_gelu[1] == plain[1] and with_gelu[2] > plain[2] + 1e-4


def test_the_setting_and_memory_decide_first():
    cell = ("linear", 16, 1.0)
    weight_bytes = LARGE[1] * LARGE[2] * 2
    assert not densifies(*cell, mode="never")
    assert densifies("linear", 128, 0.01, mode="always")
    assert densifies(*cell, memory=16 * weight_bytes) and not densifies(*cell, memory=16 * weight_bytes - 1)
    assert not densifies(*cell, mode="always", memory=16 * weight_bytes - 1)
    assert not densifies("linear", 16, 1.0, (0, 64, 64), mode="always")


@pytest.mark.parametrize("arguments", [("forward", 16, 0.5), ("linear", 16, 0.5, LARGE, "int8")], ids=str)
def test_unknown_names_are_errors(arguments):
    with pytest.raises(ValueError, match="no product is called"):
        choice(*arguments)


def test_densify_plan_is_restored():
    assert backends.get_densify_plan() == "auto"
    with pytest.raises(RuntimeError, match="inside"), backends.densify_plan("never"):
        with backends.densify_plan("always"):
            assert backends.get_densify_plan() == "always"
        assert backends.get_densify_plan() == "never"
        raise RuntimeError("inside")
    assert backends.get_densify_plan() == "auto"
    backends.set_densify_plan("never")
    assert backends.get_densify_plan() == "never"
    backends.set_densify_plan("auto")


@pytest.mark.parametrize("mode", ["on", "", None, True], ids=repr)
def test_densify_plan_refuses_other_modes(mode):
    with pytest.raises(BlockSparseError, match="mode must be one of auto, never, always"):
        backends.set_densify_plan(mode)
    assert backends.get_densify_plan() == "auto"


@pytest.mark.parametrize(
    ("value", "output"), [("never", "never"), ("", "auto"), ("0", "must be auto, never or always")]
)
def test_environment_sets_the_beginning(value, output):
    report = subprocess.run(
        [sys.executable, "-c", "from pytorch_block_sparse import backends; print(backends.get_densify_plan())"],
        env={**os.environ, "BLOCK_SPARSE_DENSIFY": value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert output in report.stdout + report.stderr
