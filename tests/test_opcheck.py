"""torch.library.opcheck: schemas, fake kernels, autograd registration and AOT dispatch of every operator."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, PATTERNS, dtype_id

OPERATORS = torch.ops.pytorch_block_sparse


def arguments(name: str, dtype: torch.dtype, device: torch.device, grad: bool) -> tuple:
    pattern = PATTERNS["permuted"]((40, 24), (16, 16))

    def tensor(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(dtype).requires_grad_(grad)

    index, geometry = pattern.index(device), list(pattern.geometry)
    sums = torch.zeros(pattern.nnz, 16, 16, device=device)
    return {
        "linear_main_grad": (tensor(5, 24), tensor(pattern.nnz, 16, 16), tensor(40), sums, index, geometry, "gelu"),
        "weight_grad-float32": (tensor(5, 40), tensor(5, 24), index, geometry, torch.float32),
        "weight_grad_accumulate_": (sums, tensor(5, 40).detach(), tensor(5, 24).detach(), index, geometry),
        "linear": (tensor(2, 3, 24), tensor(pattern.nnz, 16, 16), tensor(40), index, geometry, "none"),
        "linear-no-bias": (tensor(5, 24), tensor(pattern.nnz, 16, 16), None, index, geometry),
        "linear-gelu": (tensor(5, 24), tensor(pattern.nnz, 16, 16), tensor(40), index, geometry, "gelu"),
        "input_grad": (tensor(2, 3, 40), tensor(pattern.nnz, 16, 16), index, geometry),
        "weight_grad": (tensor(2, 3, 40), tensor(2, 3, 24), index, geometry),
        "bias_grad": (tensor(2, 3, 40),),
    }[name]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "linear-no-bias",
        "linear-gelu",
        "linear_main_grad",
        "input_grad",
        "weight_grad",
        "weight_grad-float32",
        "weight_grad_accumulate_",
        "bias_grad",
    ],
)
def test_opcheck(name, dtype, grad, device):
    operator = getattr(OPERATORS, name.split("-")[0]).default
    torch.library.opcheck(operator, arguments(name, dtype, device, grad))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name", ["linear", "input_grad", "weight_grad", "bias_grad"])
def test_fake_kernel_gives_what_the_real_one_gives(name, dtype, device):
    operator = getattr(OPERATORS, name).default
    torch.library.opcheck(operator, arguments(name, dtype, device, False), test_utils="test_faketensor")


@pytest.mark.parametrize("name", ["linear", "input_grad", "weight_grad", "bias_grad"])
def test_schema_is_pure(name):
    schema = getattr(OPERATORS, name).default._schema
    assert not schema.is_mutable
    assert all(result.alias_info is None for result in schema.returns)


def test_schema_of_the_accumulation_says_what_it_changes():
    schema = OPERATORS.weight_grad_accumulate_.default._schema
    assert [argument.name for argument in schema.arguments if argument.is_write] == ["out"]
    assert not schema.returns
