"""Few tokens, as in decoding: forward and input gradient, which a kernel of its own computes on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, Case, dtype_id, make_operands
from test_operators import STRIDES, assert_bitwise_equal, check_input_grad, check_linear
from torch import Tensor

from pytorch_block_sparse import ops
from pytorch_block_sparse.native import block_sparse_native

pytestmark = pytest.mark.usefixtures("poisoned_memory", "kernels_on_blocks")

MOST_TOKENS = 64
TOKENS = (1, 2, 7, 8, 9, 16, 17, 33, 64)
BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128), (48, 16), (32, 64), (16, 96))
CASES = [Case((328, 264), block, tokens=tokens) for block in BLOCKS for tokens in TOKENS]
CASES += [
    Case((160, 256), (32, 32), pattern, tokens)
    for pattern in ("none", "one-full-row", "empty-rows", "empty-columns", "full")
    for tokens in (1, 20)
]
# Features enough that a GPU's thread blocks take 32 or 64 rows each.
CASES += [Case(shape, (64, 64), tokens=tokens) for shape in ((8456, 136), (136, 8456)) for tokens in (12, 30, 50)]

each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)


def expect_plan(decodes: bool, result: Tensor) -> Tensor:
    if result.is_cuda:
        assert (block_sparse_native.last_plan() == "decode") == decodes
    return result


def run_all(o) -> list[Tensor]:
    return [
        expect_plan(True, ops.linear(o.x, o.values, o.pattern, o.bias)),
        expect_plan(True, ops.input_grad(o.dy, o.values, o.pattern)),
    ]


@each_dtype
@each_case
def test_few_tokens(case, dtype, device):
    o = make_operands(case, dtype, device)
    y, dx = run_all(o)
    check_linear(y, o, o.bias)
    check_input_grad(dx, o)


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("features", [328, 331])
def test_activation_and_odd_features(features, activation, dtype, device):
    o = make_operands(Case((features, 264), (16, 16), tokens=3), dtype, device)
    check_linear(expect_plan(True, ops.linear(o.x, o.values, o.pattern, None, activation)), o, None, activation)


@each_dtype
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_rows_of_any_stride(tokens, strides, dtype, device):
    o = make_operands(Case((328, 264), (32, 32), tokens=tokens), dtype, device)
    assert_bitwise_equal(run_all(replace(o, x=STRIDES[strides](o.x), dy=STRIDES[strides](o.dy))), run_all(o))


@each_dtype
@pytest.mark.parametrize("tokens", TOKENS)
def test_bitwise_repeatable(tokens, dtype, device):
    o = make_operands(Case((1040, 520), (16, 16), "power-law-rows", tokens), dtype, device)
    first = run_all(o)
    for _ in range(3):
        assert_bitwise_equal(run_all(o), first)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case((328, 264), (32, 32), tokens=MOST_TOKENS + 1), torch.bfloat16),
        (Case((328, 264), (32, 32), tokens=4), torch.float32),
        (Case((328, 264), (24, 24), tokens=4), torch.bfloat16),
        (Case((328, 261), (32, 32), tokens=4), torch.bfloat16),
    ],
    ids=str,
)
def test_what_other_kernels_serve(case, dtype, device):
    o = make_operands(case, dtype, device)
    check_linear(expect_plan(False, ops.linear(o.x, o.values, o.pattern, o.bias)), o, o.bias)


@each_dtype
def test_many_tokens_and_blocks_of_16(dtype, device):
    """Forward from 49 tokens on, Hopper's own kernel is the faster one, if it serves."""
    o = make_operands(Case((512, 256), (16, 16), tokens=MOST_TOKENS), dtype, device)
    y = ops.linear(o.x, o.values, o.pattern, o.bias)
    if y.is_cuda:
        hopper = torch.cuda.get_device_capability() == (9, 0) and os.environ.get("BLOCK_SPARSE_CUDA_PATH") != "sm80"
        assert block_sparse_native.last_plan() == ("sm90" if hopper else "decode")
    check_linear(y, o, o.bias)
