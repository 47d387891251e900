"""The four operators against dense float64, element by element within the bound of their output block."""

from __future__ import annotations

import pytest
import torch
from bounds import TOKEN_TILE, assert_within_bound, by_slot, by_tile
from cases import (
    ACTIVATIONS,
    CASES,
    DTYPES,
    PATTERNS,
    TAIL_CASES,
    Case,
    Operands,
    cases,
    dtype_id,
    make_operands,
    past_edges,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pytorch_block_sparse import ops, reference
from pytorch_block_sparse.native import block_sparse_native

pytestmark = pytest.mark.usefixtures("poisoned_memory", "kernels_on_blocks")

each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
# A few problems, each of which takes another way through the kernels.
each_sample = pytest.mark.parametrize(
    "case",
    [
        Case((200, 168), (32, 32), tokens=50),
        Case((200, 168), (16, 16), tokens=1),
        Case((130, 192), (64, 64), tokens=17),
        Case((50, 33), (7, 5), tokens=21),
        Case((192, 256), (32, 32), tokens=70),  # no ragged edge: Hopper's own kernels on a GPU
        Case((128, 320), (16, 16), tokens=70),
    ],
    ids=str,
)


def dense_activation(pre: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return pre
    if activation == "gelu_tanh":
        return functional.gelu(pre, approximate="tanh")
    return getattr(functional, activation)(pre)


def check_linear(y: Tensor, o: Operands, bias: Tensor | None, activation: str | None = None) -> None:
    weight = reference.dense_weight(o.values, o.pattern)
    magnitude = o.x.double().abs() @ weight.abs().t()
    if bias is not None:
        magnitude += bias.double().abs()
    results = (
        y,
        dense_activation(functional.linear(o.x, weight.to(o.x.dtype), bias), activation),
        reference.linear(o.x, o.values, o.pattern, bias, activation),
        magnitude,
    )
    assert_within_bound(*(by_tile(result, (TOKEN_TILE, o.pattern.block_shape[0])) for result in results))


def check_input_grad(dx: Tensor, o: Operands) -> None:
    weight = reference.dense_weight(o.values, o.pattern)
    results = (
        dx,
        o.dy @ weight.to(o.dy.dtype),
        reference.input_grad(o.dy, o.values, o.pattern),
        o.dy.double().abs() @ weight.abs(),
    )
    assert_within_bound(*(by_tile(result, (TOKEN_TILE, o.pattern.block_shape[1])) for result in results))


def check_weight_grad(dw: Tensor, o: Operands) -> None:
    results = (
        dw,
        reference.stored_blocks(o.dy.t() @ o.x, o.pattern),
        reference.weight_grad(o.dy, o.x, o.pattern),
        reference.weight_grad(o.dy.abs(), o.x.abs(), o.pattern),
    )
    assert_within_bound(*(by_slot(result) for result in results))
    outside = dw.cpu()[past_edges(o.pattern)]
    assert torch.equal(outside, torch.zeros_like(outside)), "the gradient past O or I must be exactly zero"


def check_bias_grad(db: Tensor, o: Operands) -> None:
    results = (db, o.dy.sum(0), reference.bias_grad(o.dy), reference.bias_grad(o.dy.abs()))
    assert_within_bound(*(by_slot(result[:, None, None]) for result in results))


def check_all(o: Operands, activation: str | None = None) -> None:
    check_linear(ops.linear(o.x, o.values, o.pattern, o.bias, activation), o, o.bias, activation)
    check_input_grad(ops.input_grad(o.dy, o.values, o.pattern), o)
    check_weight_grad(ops.weight_grad(o.dy, o.x, o.pattern), o)
    check_bias_grad(ops.bias_grad(o.dy), o)


def run_all(o: Operands) -> list[Tensor]:
    return [
        ops.linear(o.x, o.values, o.pattern, o.bias),
        ops.linear(o.x, o.values, o.pattern, None, "gelu"),
        ops.input_grad(o.dy, o.values, o.pattern),
        ops.weight_grad(o.dy, o.x, o.pattern),
        ops.bias_grad(o.dy),
    ]


def assert_bitwise_equal(first: list[Tensor], second: list[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@each_dtype
@each_case
def test_linear(case, dtype, device):
    o = make_operands(case, dtype, device)
    check_linear(ops.linear(o.x, o.values, o.pattern, o.bias), o, o.bias)


@each_dtype
@each_sample
def test_linear_without_bias(case, dtype, device):
    o = make_operands(case, dtype, device)
    check_linear(ops.linear(o.x, o.values, o.pattern), o, None)


@each_dtype
@each_case
def test_input_grad(case, dtype, device):
    o = make_operands(case, dtype, device)
    check_input_grad(ops.input_grad(o.dy, o.values, o.pattern), o)


@each_dtype
@each_case
def test_weight_grad(case, dtype, device):
    o = make_operands(case, dtype, device)
    check_weight_grad(ops.weight_grad(o.dy, o.x, o.pattern), o)


@each_dtype
@pytest.mark.parametrize("features", [1, 50, 256, 1001, 1024], ids=lambda features: f"O{features}")
@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 100, 1000, 5003], ids=lambda tokens: f"T{tokens}")
def test_bias_grad(tokens, features, dtype, device):
    o = make_operands(Case((features, 3), (7, 5), tokens=tokens), dtype, device)
    check_bias_grad(ops.bias_grad(o.dy), o)


@each_dtype
def test_bias_grad_of_many_terms_of_one_sign(dtype, device):
    o = make_operands(Case((48, 1), (16, 16), tokens=100_000, data="negative"), dtype, device)
    check_bias_grad(ops.bias_grad(o.dy), o)


@settings(max_examples=300)
@given(
    case=cases(),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    seed=st.integers(0, 2**16),
)
def test_any_problem(case, dtype, activation, seed, device):
    torch.manual_seed(seed)
    check_all(make_operands(case, dtype, device), activation)


@pytest.mark.parametrize("features", [128, 256, 512, 1000, 2000])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_long_sums_of_one_sign(features, block, device):
    """Rounding errors add up most where every term has one sign: a sum must be split about as finely as PyTorch's."""
    for seed in range(10 if features <= 1000 else 2):
        torch.manual_seed(seed)
        case = Case((features, features), (block, block), "full", 39, "negative")
        check_all(make_operands(case, torch.float32, device))


def test_uninitialised_memory_is_nan(device):
    """Else the tests of this file could not see an output that nobody wrote; native allocations are meant too."""
    with torch.profiler.profile() as profile:
        ops.input_grad(
            torch.ones(2, 64, device=device), torch.ones(1, 64, 64, device=device), PATTERNS["full"]((64, 64), (64, 64))
        )
    inside = [event.name for event in profile.events() if event.name in ("aten::empty", "aten::fill_")]
    assert inside.count("aten::fill_") >= 3  # two ones() and the output's NaN
    assert torch.empty(3, device=device).isnan().all()


@each_dtype
@each_sample
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_activation(case, dtype, activation, device):
    o = make_operands(case, dtype, device)
    check_linear(ops.linear(o.x, o.values, o.pattern, o.bias, activation), o, o.bias, activation)


@each_sample
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_with_a_graph_is_the_fused_one(case, activation, device):
    o = make_operands(case, torch.float64, device)
    fused = ops.linear(o.x, o.values, o.pattern, o.bias, activation)
    recorded = ops.linear(o.x.requires_grad_(), o.values, o.pattern, o.bias, activation)
    assert recorded.requires_grad and not fused.requires_grad
    torch.testing.assert_close(fused, recorded.detach(), rtol=1e-12, atol=1e-14)


STRIDES = {
    "column-slice": lambda t: torch.cat((t, torch.full_like(t, torch.nan)), 1)[:, : t.shape[1]],
    "offset-column-slice": lambda t: torch.nn.functional.pad(t, (3, 2), value=torch.nan)[:, 3:-2],
    "row-slice": lambda t: torch.stack((t, torch.full_like(t, torch.nan)), 1).flatten(0, 1)[::2],
    "transposed": lambda t: t.t().contiguous().t(),
    "every-other-column": lambda t: torch.stack((t, torch.full_like(t, torch.nan)), 2).flatten(1)[:, ::2],
    "three-dimensions": lambda t: t.view(1, *t.shape).transpose(0, 1).contiguous().transpose(0, 1)[0],
}


@each_dtype
@each_sample
@pytest.mark.parametrize("strides", STRIDES)
def test_strided_operands(case, dtype, strides, device):
    o = make_operands(case, dtype, device)
    strided = Operands(o.pattern, STRIDES[strides](o.x), o.values, o.bias, STRIDES[strides](o.dy))
    *ours, db = run_all(strided)
    assert_bitwise_equal(ours, run_all(o)[:-1])
    check_bias_grad(db, o)  # the sum over tokens is PyTorch's own, and adds in the order of the strides


@each_dtype
@pytest.mark.parametrize(
    "case",
    [*TAIL_CASES, Case((96, 160), (32, 32), tokens=100), Case((96, 160), (16, 16), tokens=130)],
    ids=str,
)
def test_nan_beside_the_tokens(case, dtype, device):
    """NaN in the rows after the last token, and left behind in shared memory by the product before, reach no result."""
    o = make_operands(case, dtype, device)
    results = []
    for product, operand in ((ops.linear, o.x), (ops.input_grad, o.dy)):
        rows = torch.full((case.tokens + 256, operand.shape[1]), torch.nan, dtype=dtype, device=device)
        product(rows, o.values, o.pattern)
        rows[: case.tokens] = operand
        results.append(product(rows[: case.tokens], o.values, o.pattern))
    check_linear(results[0], o, None)
    check_input_grad(results[1], o)


@each_sample
def test_expanded_operands(case, device):
    o = make_operands(case, torch.float32, device)
    x, dy = o.x[:1].expand(9, -1), o.dy[:1].expand(9, -1)
    expanded = Operands(o.pattern, x, o.values, o.bias, dy)
    whole = Operands(o.pattern, x.contiguous(), o.values, o.bias, dy.contiguous())
    assert_bitwise_equal(run_all(expanded)[:-1], run_all(whole)[:-1])
    one_number = torch.ones((), device=device)
    y = ops.input_grad(one_number.expand_as(o.dy), o.values, o.pattern)
    assert torch.equal(y, ops.input_grad(torch.ones_like(o.dy), o.values, o.pattern))


@each_sample
def test_strided_values_and_bias(case, device):
    o = make_operands(case, torch.float32, device)
    values = torch.stack((o.values.transpose(1, 2), torch.full_like(o.values.transpose(1, 2), torch.nan)), 3)
    bias = torch.stack((o.bias, torch.full_like(o.bias, torch.nan)), 1)
    strided = Operands(o.pattern, o.x, values[..., 0].transpose(1, 2), bias[:, 0], o.dy)
    assert not strided.values.is_contiguous() and not strided.bias.is_contiguous()
    assert_bitwise_equal(run_all(strided), run_all(o))


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 0, 3), (1, 1, 1, 4)], ids=str)
def test_leading_dimensions(leading, device):
    pattern = PATTERNS["half"]((50, 33), (7, 5))
    x, dy = torch.randn(*leading, 33, device=device), torch.randn(*leading, 50, device=device)
    values = torch.randn(pattern.nnz, 7, 5, device=device).masked_fill_(past_edges(pattern).to(device), 0)
    y, dx, dw, db = (
        ops.linear(x, values, pattern),
        ops.input_grad(dy, values, pattern),
        ops.weight_grad(dy, x, pattern),
        ops.bias_grad(dy),
    )
    assert (y.shape, dx.shape, db.shape) == (dy.shape, x.shape, (50,))
    assert_bitwise_equal(
        [y.reshape(-1, 50), dx.reshape(-1, 33), dw, db],
        [
            ops.linear(x.reshape(-1, 33), values, pattern),
            ops.input_grad(dy.reshape(-1, 50), values, pattern),
            ops.weight_grad(dy.reshape(-1, 50), x.reshape(-1, 33), pattern),
            ops.bias_grad(dy.reshape(-1, 50)),
        ],
    )


@pytest.mark.parametrize("name", ["linear", "input_grad"])
def test_results_are_contiguous_and_new(name, device):
    o = make_operands(Case((64, 64), (32, 32)), torch.float32, device)
    result = getattr(ops, name)(o.x.t().contiguous().t(), o.values, o.pattern)
    assert result.is_contiguous() and result.data_ptr() != o.x.data_ptr()


@each_dtype
@each_sample
def test_no_tokens_give_zero_gradients(case, dtype, device):
    o = make_operands(Case(case.shape, case.block, tokens=0), dtype, device)
    assert torch.equal(ops.weight_grad(o.dy, o.x, o.pattern), torch.zeros_like(o.values))
    assert torch.equal(ops.bias_grad(o.dy), torch.zeros_like(o.bias))


@each_dtype
@each_sample
def test_bitwise_repeatable(case, dtype, device):
    o = make_operands(case, dtype, device)
    first = run_all(o)
    for _ in range(3):
        assert_bitwise_equal(run_all(o), first)


@each_dtype
@pytest.mark.parametrize(
    "case",
    [Case((640, 512), (32, 32), tokens=200), Case((96, 160), (16, 16), tokens=1), Case((50, 33), (7, 5), tokens=100)],
    ids=str,
)
def test_number_of_threads_changes_nothing(case, dtype, set_threads):
    o = make_operands(case, dtype)
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        results.append(run_all(o)[:-1])  # the sum over tokens is PyTorch's own
    assert_bitwise_equal(results[0], results[1])
    assert_bitwise_equal(results[0], results[2])


def assert_nan_where_stored(result: Tensor, stored: Tensor, case: Case) -> None:
    """NaN in all columns that `stored` says, and in no other. Hopper's kernel takes lines of blocks under 64 side by
    side, and multiplies the absent ones as zeros: there others may be NaN, too."""
    nan = result.isnan().cpu()
    assert nan[:, stored].all()
    side_by_side = result.is_cuda and block_sparse_native.last_plan() == "sm90" and any(b % 64 for b in case.block)
    if not side_by_side:
        assert not nan[:, ~stored].any()


@each_dtype
@each_sample
def test_nan_in_a_feature_reaches_only_the_rows_that_store_its_column(case, dtype, device):
    o = make_operands(Case(case.shape, case.block, "half", case.tokens), dtype, device)
    feature = case.shape[1] - 1
    o.x[:, feature] = torch.nan
    stored = o.pattern.mask()[:, feature // case.block[1]].repeat_interleave(case.block[0])[: case.shape[0]]
    y = ops.linear(o.x, o.values, o.pattern, o.bias)
    assert_nan_where_stored(y, stored, case)


@each_dtype
@each_sample
def test_nan_in_an_output_gradient_reaches_only_its_columns_and_blocks(case, dtype, device):
    o = make_operands(Case(case.shape, case.block, "half", case.tokens), dtype, device)
    feature = case.shape[0] - 1
    o.dy[:, feature] = torch.nan
    stored = o.pattern.mask()[feature // case.block[0]].repeat_interleave(case.block[1])[: case.shape[1]]
    dx = ops.input_grad(o.dy, o.values, o.pattern)
    assert_nan_where_stored(dx, stored, case)
    dw = ops.weight_grad(o.dy, o.x, o.pattern)
    expected = torch.zeros_like(o.values.cpu(), dtype=torch.bool)
    expected[o.pattern.block_coords[:, 0] == feature // case.block[0], feature % case.block[0]] = True
    assert torch.equal(dw.isnan().cpu(), expected & ~past_edges(o.pattern))


@each_dtype
@each_sample
def test_nan_in_a_token_stays_in_its_row(case, dtype, device):
    o = make_operands(Case(case.shape, case.block, "full", 20), dtype, device)
    clean = ops.linear(o.x, o.values, o.pattern), ops.input_grad(o.dy, o.values, o.pattern)
    o.x[7], o.dy[7] = torch.inf, torch.nan
    others = torch.arange(20, device=device) != 7
    for ours, before in zip(
        (ops.linear(o.x, o.values, o.pattern), ops.input_grad(o.dy, o.values, o.pattern)), clean, strict=True
    ):
        assert not ours[7].isfinite().any() and torch.equal(ours[others], before[others])
