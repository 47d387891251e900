"""Few problems that together take every path of every kernel: compute-sanitizer runs this file (make gpu-test).

Features and tokens are ragged: unaligned rows, edge blocks, a last tile that is not full. 600 tokens of few blocks
split the weight gradient. What takes long under a sanitizer is the number of launches, so a path is taken once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import DTYPES, Case, dtype_id, make_operands
from test_operators import check_all

pytestmark = pytest.mark.usefixtures("poisoned_memory")

COVERING = [
    Case((200, 168), (16, 16), tokens=70),
    Case((100, 90), (16, 16), "half", tokens=600),
    Case((200, 168), (32, 32), tokens=300),
    Case((130, 77), (32, 32), tokens=600),
    Case((192, 136), (64, 64), tokens=70),
    Case((260, 192), (64, 64), tokens=270),  # inner features that blocks divide: the Hopper kernels
    Case((300, 264), (128, 128), tokens=140),
    Case((96, 200), (48, 16), tokens=33),
    Case((50, 33), (7, 5), tokens=21),
]


@pytest.fixture(params=["highest", "high"])
def float32_precision(request) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=dtype_id)
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering(case, dtype, device):
    check_all(make_operands(case, dtype, device))


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering_float32(case, float32_precision, device):
    check_all(make_operands(case, torch.float32, device))


def test_covering_many_outputs(device):
    """More outputs than 3xTF32 sums in two levels."""
    check_all(make_operands(Case((64, 16800), (32, 32), "sparse", tokens=520), torch.float32, device))
    check_all(make_operands(Case((16800, 64), (64, 64), "sparse", tokens=520), torch.float32, device))
