"""Few problems that together take every path of every kernel: compute-sanitizer runs this file (make gpu-test).

Features and tokens are ragged: unaligned rows, edge blocks, a last tile that is not full. 600 tokens of few blocks
split the weight gradient. What takes long under a sanitizer is the number of launches, so a path is taken once.
What the results are compared with is computed on the CPU: racecheck breaks on cuBLAS' kernels.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import DTYPES, Case, Operands, dtype_id, make_operands
from test_operators import check_bias_grad, check_input_grad, check_linear, check_weight_grad
from torch import Tensor

from pytorch_block_sparse import ops, reference

pytestmark = pytest.mark.usefixtures("poisoned_memory", "kernels_on_blocks")

COVERING = [
    Case((200, 168), (16, 16), tokens=70),
    Case((100, 90), (16, 16), "half", tokens=600),
    Case((200, 168), (32, 32), tokens=300),
    Case((130, 77), (32, 32), tokens=600),
    Case((768, 256), (32, 32), "half", tokens=140),  # Hopper: clusters of two, three groups and one
    Case((2176, 64), (32, 32), "full", tokens=2100),  # more tiles than clusters, the last group half empty
    Case((192, 136), (64, 64), tokens=70),
    Case((264, 192), (64, 64), tokens=270),  # inner features that blocks divide: the Hopper kernel
    Case((300, 264), (128, 128), tokens=140),
    Case((256, 128), (128, 128), tokens=140),  # fewer tokens than the Hopper kernel's tile
    Case((96, 200), (48, 16), tokens=33),
    Case((50, 33), (7, 5), tokens=21),
    Case((264, 200), (16, 16), tokens=5),  # few tokens
    Case((8456, 136), (64, 64), tokens=12),
    Case((136, 8456), (64, 64), tokens=50),
]
each_case = pytest.mark.parametrize("case", COVERING, ids=str)


def products(o: Operands, device: torch.device) -> list[Tensor]:
    """y, dx, dW, 1 + dW added by the kernel, and db, computed on ``device``, on the CPU."""
    there = replace(o, **{name: getattr(o, name).to(device) for name in ("x", "values", "bias", "dy")})
    ones = torch.ones_like(there.values, dtype=torch.float32 if o.x.dtype.itemsize == 2 else o.x.dtype)
    results = (
        ops.linear(there.x, there.values, there.pattern, there.bias),
        ops.input_grad(there.dy, there.values, there.pattern),
        ops.weight_grad(there.dy, there.x, there.pattern),
        ops.weight_grad_accumulate_(ones, there.dy, there.x, there.pattern),
        ops.bias_grad(there.dy),
    )
    return [result.cpu() for result in results]


def check(o: Operands, device: torch.device) -> None:
    y, dx, dw, one_more, db = products(o, device)
    check_linear(y, o, o.bias)
    check_input_grad(dx, o)
    check_weight_grad(dw, o)
    check_bias_grad(db, o)
    rounding = 2 * torch.finfo(dw.dtype).eps
    torch.testing.assert_close(one_more, 1 + dw.to(one_more.dtype), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@each_case
def test_covering(case, dtype, device):
    check(make_operands(case, dtype), device)


@pytest.mark.parametrize(
    "case",
    [Case((64, 16800), (32, 32), "sparse", 520), Case((16800, 64), (64, 64), "sparse", 520)],
    ids=str,
)
def test_covering_many_outputs(case, device):
    """More outputs than 3xTF32 sums in two levels."""
    check(make_operands(case, torch.float32), device)


@each_case
def test_covering_tf32(case, device):
    o = make_operands(case, torch.float32)
    torch.set_float32_matmul_precision("high")
    try:
        ours = products(o, device)
    finally:
        torch.set_float32_matmul_precision("highest")
    exact = (
        reference.linear(o.x, o.values, o.pattern, o.bias),
        reference.input_grad(o.dy, o.values, o.pattern),
        reference.weight_grad(o.dy, o.x, o.pattern),
    )
    for result, expected in zip(ours[:3], exact, strict=True):
        assert (result - expected).abs().max() <= 2e-3 * expected.abs().max()
