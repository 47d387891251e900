"""Bad input: every message names the argument, every error of the public API is a BlockSparseError, nothing has changed."""

# ruff: noqa: E501  (a row of the table is one call and what its message says)

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import DTYPES
from torch import nn

from pytorch_block_sparse import BlockPattern, BlockSparseError, BlockSparseLinear, BlockSparseMatrix, ops
from pytorch_block_sparse.native import block_sparse_native
from pytorch_block_sparse.pattern_input import as_pattern

GRID = torch.tensor([[True, False], [True, True]])
PATTERN = BlockPattern.from_mask(GRID, (4, 4), (8, 7))
X, VALUES, BIAS, DY = torch.randn(5, 7), torch.randn(3, 4, 4), torch.randn(8), torch.randn(5, 8)
NAN, INF = float("nan"), float("inf")


def coords(*places: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(places)


def layer(**kwargs) -> BlockSparseLinear:
    return BlockSparseLinear(8, 8, **{"block_shape": (4, 4), **kwargs})


def matrix() -> BlockSparseMatrix:
    return BlockSparseMatrix(PATTERN, VALUES)


# id -> (call, what the message must match: the argument first)
BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    # operators: dtype
    "linear-integer-x": (lambda: ops.linear(X.int(), VALUES, PATTERN), "x must be float64"),
    "linear-complex-x": (lambda: ops.linear(X.cfloat(), VALUES, PATTERN), "x must be float64"),
    "linear-values-dtype": (lambda: ops.linear(X, VALUES.double(), PATTERN), "values must have the dtype of x"),
    "linear-bias-dtype": (lambda: ops.linear(X, VALUES, PATTERN, BIAS.half()), "bias must have the dtype of x"),
    "input-grad-dtype": (lambda: ops.input_grad(DY.bfloat16(), VALUES, PATTERN), "values must have the dtype of dy"),
    "weight-grad-dtype": (lambda: ops.weight_grad(DY, X.half(), PATTERN), "x must have the dtype of dy"),
    "bias-grad-dtype": (lambda: ops.bias_grad(DY.long()), "dy must be float64"),
    # operators: device
    "linear-meta-x": (lambda: ops.linear(X.to("meta"), VALUES, PATTERN), "values must be on the device of x"),
    "linear-meta-values": (lambda: ops.linear(X, VALUES.to("meta"), PATTERN), "values must be on the device of x"),
    "linear-meta-bias": (lambda: ops.linear(X, VALUES, PATTERN, BIAS.to("meta")), "bias must be on the device of x"),
    "input-grad-meta-values": (lambda: ops.input_grad(DY, VALUES.to("meta"), PATTERN), "values must be on the device of dy"),
    "weight-grad-meta-x": (lambda: ops.weight_grad(DY, X.to("meta"), PATTERN), "x must be on the device of dy"),
    # operators: shape
    "linear-features": (lambda: ops.linear(X[:, :6], VALUES, PATTERN), r"x must be \[\.\.\., 7\]"),
    "linear-no-dimension": (lambda: ops.linear(X[0, 0], VALUES, PATTERN), r"x must be \[\.\.\., 7\]"),
    "linear-nnz": (lambda: ops.linear(X, VALUES[:2], PATTERN), r"values must be \[3, 4, 4\]"),
    "linear-flat-values": (lambda: ops.linear(X, VALUES.flatten(), PATTERN), r"values must be \[3, 4, 4\]"),
    "linear-bias-length": (lambda: ops.linear(X, VALUES, PATTERN, BIAS[:7]), r"bias must be \[8\]"),
    "linear-bias-dimensions": (lambda: ops.linear(X, VALUES, PATTERN, BIAS[None]), r"bias must be \[8\]"),
    "linear-activation": (lambda: ops.linear(X, VALUES, PATTERN, activation="tanh"), "activation must be"),
    "input-grad-features": (lambda: ops.input_grad(X, VALUES, PATTERN), r"dy must be \[\.\.\., 8\]"),
    "input-grad-nnz": (lambda: ops.input_grad(DY, VALUES[:2], PATTERN), r"values must be \[3, 4, 4\]"),
    "weight-grad-dy-features": (lambda: ops.weight_grad(X, X, PATTERN), r"dy must be \[\.\.\., 8\]"),
    "weight-grad-x-features": (lambda: ops.weight_grad(DY, DY, PATTERN), r"x must be \[\.\.\., 7\]"),
    "weight-grad-tokens": (lambda: ops.weight_grad(DY, X[:4], PATTERN), "x must have the leading dimensions of dy"),
    "weight-grad-out-dtype": (lambda: ops.weight_grad(DY, X, PATTERN, torch.bfloat16), "out_dtype must be the operands' dtype"),
    "weight-grad-float32-of-double": (lambda: ops.weight_grad(DY.double(), X.double(), PATTERN, torch.float32), "out_dtype must be the operands' dtype"),
    "accumulate-shape": (lambda: ops.weight_grad_accumulate_(VALUES[:2], DY, X, PATTERN), r"out must be \[3, 4, 4\]"),
    "accumulate-dtype": (lambda: ops.weight_grad_accumulate_(VALUES.half(), DY, X, PATTERN), "out's dtype must be the operands' dtype"),
    "accumulate-strides": (lambda: ops.weight_grad_accumulate_(VALUES.transpose(1, 2), DY, X, PATTERN), "out must be contiguous"),
    "accumulate-meta": (lambda: ops.weight_grad_accumulate_(VALUES.to("meta"), DY, X, PATTERN), "out must be on the device of dy"),
    "accumulate-tokens": (lambda: ops.weight_grad_accumulate_(VALUES, DY, X[:4], PATTERN), "x must have the leading dimensions of dy"),
    "linear-main-grad-shape": (lambda: ops.linear(X, VALUES, PATTERN, main_grad=torch.zeros(2, 4, 4)), r"main_grad must be \[3, 4, 4\]"),
    "linear-main-grad-dtype": (lambda: ops.linear(X, VALUES, PATTERN, main_grad=torch.zeros(3, 4, 4).double()), "main_grad's dtype must be the operands' dtype"),
    "bias-grad-no-dimension": (lambda: ops.bias_grad(DY[0, 0]), "dy must be"),
    # pattern: coordinates
    "coords-row": (lambda: BlockPattern.from_coords(coords((2, 0)), (8, 8), (4, 4)), "block_coords: every block row"),
    "coords-column": (lambda: BlockPattern.from_coords(coords((0, 2)), (8, 8), (4, 4)), "block_coords: every block column"),
    "coords-negative": (lambda: BlockPattern.from_coords(coords((-1, 0)), (8, 8), (4, 4)), "block_coords: every block row"),
    "coords-past-int32": (lambda: BlockPattern.from_coords(coords((2**32, 0)), (8, 8), (4, 4)), "block_coords: every block row"),
    "coords-twice": (lambda: BlockPattern.from_coords(coords((0, 1), (1, 0), (0, 1)), (8, 8), (4, 4)), r"block_coords .*\(0, 1\)"),
    "coords-float": (lambda: BlockPattern.from_coords(coords((0, 1)).float(), (8, 8), (4, 4)), "block_coords must be an integer"),
    "coords-bool": (lambda: BlockPattern.from_coords(coords((0, 1)).bool(), (8, 8), (4, 4)), "block_coords must be an integer"),
    "coords-flat": (lambda: BlockPattern.from_coords(torch.tensor([0, 1]), (8, 8), (4, 4)), "block_coords must be"),
    "coords-three": (lambda: BlockPattern.from_coords(torch.tensor([[0, 1, 0]]), (8, 8), (4, 4)), "block_coords must be"),
    "coords-meta": (lambda: BlockPattern.from_coords(torch.zeros(1, 2, dtype=torch.int32, device="meta"), (8, 8), (4, 4)), "block_coords must hold data"),
    # pattern: sizes
    "shape-zero": (lambda: BlockPattern.random((0, 8), 0.5, (4, 4)), r"shape\[0\] must be an integer >= 1"),
    "shape-three": (lambda: BlockPattern.random((8, 8, 8), 0.5, (4, 4)), "shape must be a pair"),
    "shape-past-int32": (lambda: BlockPattern.random((2**31, 8), 0.5, (4, 4)), r"shape\[0\] must be an integer .* int32"),
    "block-zero": (lambda: BlockPattern.random((8, 8), 0.5, (0, 4)), r"block_shape\[0\] must be an integer >= 1"),
    "block-negative": (lambda: BlockPattern.random((8, 8), 0.5, (4, -4)), r"block_shape\[1\] must be an integer >= 1"),
    "block-float": (lambda: BlockPattern.random((8, 8), 0.5, (4, 4.5)), r"block_shape\[1\] must be an integer >= 1"),
    "block-whole-float": (lambda: BlockPattern.random((8, 8), 0.5, (4, 4.0)), r"block_shape\[1\] must be an integer >= 1"),
    "block-bool": (lambda: BlockPattern.random((8, 8), 0.5, (True, 4)), r"block_shape\[0\] must be an integer >= 1"),
    "block-one-number": (lambda: BlockPattern.random((8, 8), 0.5, 4), "block_shape must be a pair of positive"),
    "block-text": (lambda: BlockPattern.random((8, 8), 0.5, "44"), r"block_shape\[0\] must be an integer >= 1"),
    "block-infinite": (lambda: BlockPattern.random((8, 8), 0.5, (INF, 4)), r"block_shape\[0\] must be an integer >= 1"),
    "block-past-int32": (lambda: BlockPattern.random((8, 8), 0.5, (2**31, 4)), r"block_shape\[0\] must be an integer .* int32"),
    "density-zero": (lambda: BlockPattern.random((8, 8), 0.0, (4, 4)), "density must be"),
    "density-negative": (lambda: BlockPattern.random((8, 8), -0.5, (4, 4)), "density must be"),
    "density-above-one": (lambda: BlockPattern.random((8, 8), 1.001, (4, 4)), "density must be"),
    "density-nan": (lambda: BlockPattern.random((8, 8), NAN, (4, 4)), "density must be"),
    "density-infinite": (lambda: BlockPattern.random((8, 8), INF, (4, 4)), "density must be"),
    "density-bool": (lambda: BlockPattern.random((8, 8), True, (4, 4)), "density must be"),
    "density-text": (lambda: BlockPattern.random((8, 8), "0.5", (4, 4)), "density must be"),
    "nnz-past-int32": (lambda: BlockPattern.random((2**20, 2**20), block_shape=(1, 1), nnz=2**31), "nnz must be an integer .* int32"),
    "density-past-int32": (lambda: BlockPattern.random((2**20, 2**20), 0.5, (1, 1)), "nnz must be an integer .* int32"),
    "nnz-past-grid": (lambda: BlockPattern.random((8, 8), block_shape=(4, 4), nnz=5), "nnz must be"),
    "nnz-negative": (lambda: BlockPattern.random((8, 8), block_shape=(4, 4), nnz=-1), "nnz must be"),
    "nnz-float": (lambda: BlockPattern.random((8, 8), block_shape=(4, 4), nnz=2.0), "nnz must be"),
    "density-and-nnz": (lambda: BlockPattern.random((8, 8), 0.5, (4, 4), nnz=2), "density and nnz"),
    "neither-density-nor-nnz": (lambda: BlockPattern.random((8, 8), block_shape=(4, 4)), "density and nnz"),
    "bandwidth-negative": (lambda: BlockPattern.banded((8, 8), (4, 4), bandwidth=-1), "bandwidth must be"),
    "groups-zero": (lambda: BlockPattern.block_diagonal((8, 8), (4, 4), groups=0), "groups must be"),
    "groups-past-grid": (lambda: BlockPattern.block_diagonal((8, 8), (4, 4), groups=3), "groups must be"),
    "max-stride-negative": (lambda: BlockPattern.butterfly((8, 8), (4, 4), max_stride=-1), "max_stride must be"),
    "mask-integer": (lambda: BlockPattern.from_mask(GRID.int(), (4, 4)), "mask must be a bool grid"),
    "mask-flat": (lambda: BlockPattern.from_mask(GRID.flatten(), (4, 4)), "mask must be a bool grid"),
    "mask-grid": (lambda: BlockPattern.from_mask(GRID, (4, 4), (9, 8)), "mask must be the block grid"),
    "mask-meta": (lambda: BlockPattern.from_mask(GRID.to("meta"), (4, 4)), "mask must be a bool grid"),
    "mask-ragged": (lambda: BlockPattern.from_mask([[True], [True, False]], (4, 4)), "mask must be"),
    # pattern: changes
    "rewire-slot": (lambda: PATTERN.rewire([3], [[0, 1]]), "slots must be from 0 to 2"),
    "rewire-slot-negative": (lambda: PATTERN.rewire([-1], [[0, 1]]), "slots must be from 0 to 2"),
    "rewire-slot-twice": (lambda: PATTERN.rewire([0, 0], [[0, 1], [0, 0]]), "slots must not"),
    "rewire-onto-a-stored-block": (lambda: PATTERN.rewire([0], [[1, 1]]), r"block_coords .*\(1, 1\)"),
    "rewire-out-of-range": (lambda: PATTERN.rewire([0], [[2, 0]]), "block_coords: every block row"),
    "rewire-lengths": (lambda: PATTERN.rewire([0, 1], [[0, 1]]), "block_coords must be"),
    "rebuild-nnz": (lambda: PATTERN.rebuild(torch.ones(2, 2, dtype=torch.bool)), "mask must keep nnz"),
    "rebuild-grid": (lambda: PATTERN.rebuild(torch.ones(3, 1, dtype=torch.bool)), "mask must be the block grid"),
    # what may stand for a pattern
    "as-pattern-type": (lambda: as_pattern(object(), (8, 8)), "pattern must be a BlockPattern"),
    "as-pattern-none": (lambda: as_pattern(None, (8, 8)), "pattern must be a BlockPattern"),
    "as-pattern-shape": (lambda: as_pattern(PATTERN, (8, 8)), "pattern must have shape"),
    "as-pattern-block": (lambda: as_pattern(PATTERN, (8, 7), (2, 2)), "block_shape .* contradicts"),
    # layer
    "layer-zero-features": (lambda: BlockSparseLinear(0, 8), "in_features must be"),
    "layer-float-features": (lambda: BlockSparseLinear(8.5, 8), "in_features must be"),
    "layer-density": (lambda: layer(density=0), "density must be"),
    "layer-density-nan": (lambda: layer(density=NAN), "density must be"),
    "layer-block-zero": (lambda: layer(block_shape=(0, 4)), r"block_shape\[0\] must be"),
    "layer-block-negative": (lambda: layer(block_shape=(-4, 4)), r"block_shape\[0\] must be"),
    "layer-activation": (lambda: layer(activation="tanh"), "activation must be"),
    "layer-dtype": (lambda: layer(dtype=torch.int32), "dtype must be"),
    "layer-complex": (lambda: layer(dtype=torch.complex64), "dtype must be"),
    "layer-float8": (lambda: layer(dtype=torch.float8_e4m3fn), "dtype must be"),
    "layer-pattern-shape": (lambda: BlockSparseLinear(8, 8, pattern=PATTERN), "pattern must have shape"),
    "layer-pattern-block": (lambda: BlockSparseLinear(7, 8, pattern=PATTERN, block_shape=(2, 2)), "block_shape .* contradicts"),
    "layer-pattern-density": (lambda: BlockSparseLinear(7, 8, pattern=PATTERN, density=0.5), "density .* contradicts"),
    "layer-pattern-density-range": (lambda: BlockSparseLinear(7, 8, pattern=PATTERN, density=NAN), "density must be"),
    "layer-mask-grid": (lambda: BlockSparseLinear(16, 8, pattern=GRID, block_shape=(4, 4)), "mask must be the block grid"),
    "layer-no-linear": (lambda: BlockSparseLinear(0, 0, torch_nn_linear=nn.ReLU()), "torch_nn_linear must be"),
    "layer-linear-features": (lambda: BlockSparseLinear(9, 8, torch_nn_linear=nn.Linear(8, 8)), "in_features must be 0 or"),
    "layer-linear-out-features": (lambda: BlockSparseLinear(8, 9, torch_nn_linear=nn.Linear(8, 8)), "out_features must be 0 or"),
    "from-linear-type": (lambda: BlockSparseLinear.from_linear(nn.ReLU()), "linear must be"),
    "from-linear-importance": (lambda: BlockSparseLinear.from_linear(nn.Linear(8, 8), density=0.5, importance="best", block_shape=(4, 4)), "importance must be"),
    "from-linear-scores": (lambda: BlockSparseLinear.from_linear(nn.Linear(8, 8), density=0.5, importance=torch.ones(3, 3), block_shape=(4, 4)), "importance must be"),
    "from-linear-density-and-pattern": (lambda: BlockSparseLinear.from_linear(nn.Linear(7, 8), density=0.5, pattern=PATTERN), "density .* contradicts"),
    "to-linear-activation": (lambda: layer(activation="relu").to_linear(), "to_linear needs activation None"),
    "forward-features": (lambda: layer()(torch.randn(2, 7)), r"x must be \[\.\.\., 8\]"),
    "forward-dtype": (lambda: layer()(torch.randn(2, 8, dtype=torch.float64)), "dtype"),
    "forward-device": (lambda: layer()(torch.randn(2, 8, device="meta")), "device"),
    # matrix
    "matrix-values": (lambda: BlockSparseMatrix(PATTERN, VALUES[:2]), "values must be"),
    "matrix-dense-dimensions": (lambda: BlockSparseMatrix.from_dense(X[0], (4, 4)), "dense must have 2 dimensions"),
    "matrix-block-count": (lambda: BlockSparseMatrix.from_dense(X, (4, 4), block_count=5), "block_count must be"),
    "matrix-block-count-bool": (lambda: BlockSparseMatrix.from_dense(X, (4, 4), block_count=True), "block_count must be"),
    "matrix-two-choices": (lambda: BlockSparseMatrix.from_dense(X, (4, 4), block_count=1, blocks=[(0, 0)]), "block_count, blocks"),
    "matrix-pattern-shape": (lambda: BlockSparseMatrix.from_dense(X, pattern=PATTERN), "pattern must have the shape of dense"),
    "matrix-blocks-twice": (lambda: BlockSparseMatrix.from_dense(X, (4, 4), blocks=[(0, 0), (0, 0)]), "block_coords"),
    "matrix-blocks-range": (lambda: BlockSparseMatrix.zeros((8, 8), blocks=[(0, 2)], block_shape=(4, 4)), "block_coords"),
    "matrix-n-blocks-and-blocks": (lambda: BlockSparseMatrix.zeros((8, 8), 1, [(0, 0)]), "n_blocks and blocks"),
    "matrix-bsr-edges": (lambda: matrix().to_bsr(), "multiple of the block"),
    "matrix-not-bsr": (lambda: BlockSparseMatrix.from_bsr(X), "bsr must be"),
    "matrix-replacements": (lambda: matrix().block_replace(torch.tensor([[0, 1]])), "block_replacements must be"),
    "matrix-product-features": (lambda: matrix().reverse_matmul(DY), r"x must be \[\.\.\., 7\]"),
    "matrix-support-features": (lambda: matrix().matmul_with_output_sparse_support(X, X), r"dy must be \[\.\.\., 8\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_message_names_the_argument(name):
    call, message = BAD_CALLS[name]
    with pytest.raises(BlockSparseError, match=message):
        call()


@pytest.mark.parametrize("name", [name for name in BAD_CALLS if name.startswith(("linear", "input", "weight", "bias"))])
def test_message_is_the_same_with_a_graph(name, monkeypatch):
    """The autograd layer must not turn it into something else."""
    call, message = BAD_CALLS[name]
    for tensor in (X, VALUES, BIAS, DY):
        monkeypatch.setattr(tensor, "requires_grad", True)
    with pytest.raises(BlockSparseError, match=message):
        call()


def test_base_error_is_a_value_error():
    assert issubclass(BlockSparseError, ValueError)


# Nothing has changed

BAD_CHANGES = {
    "rewire-slot": lambda layer: layer.rewire([99], [[0, 1]]),
    "rewire-out-of-range": lambda layer: layer.rewire([0], [[9, 0]]),
    "rewire-onto-a-stored-block": lambda layer: layer.rewire([0], layer.block_coords[1:2]),
    "rewire-values": lambda layer: layer.rewire([0], (~layer.pattern.mask()).nonzero()[:1], torch.ones(2, 4, 4)),
    "rewire-to-nnz": lambda layer: layer.rewire_to(torch.ones(2, 2, dtype=torch.bool)),
    "rewire-to-grid": lambda layer: layer.rewire_to(torch.ones(1, 2, dtype=torch.bool)),
    "block-replace": lambda layer: layer.weight.block_replace(torch.tensor([[9, 9, 0]])),
    "forward": lambda layer: layer(torch.randn(3, 9)),
}


@pytest.mark.parametrize("name", BAD_CHANGES)
def test_a_refused_change_changes_nothing(name):
    changed = layer()
    pattern, before = changed.pattern, {key: tensor.clone() for key, tensor in changed.state_dict().items()}
    with pytest.raises(BlockSparseError):
        BAD_CHANGES[name](changed)
    assert changed.pattern is pattern
    for key, tensor in changed.state_dict().items():
        assert torch.equal(tensor, before[key])


# The operators below the wrappers: what reaches a kernel has been checked there too

INDEX, GEOMETRY = PATTERN.index(), list(PATTERN.geometry)
RAW = torch.ops.pytorch_block_sparse

BAD_RAW_CALLS: dict[str, tuple[dict, str]] = {
    "geometry-of-four": ({"geometry": GEOMETRY[:4]}, "geometry must be"),
    "geometry-of-six": ({"geometry": [*GEOMETRY, 1]}, "geometry must be"),
    "geometry-zero-block": ({"geometry": [8, 7, 0, 4, 3]}, "geometry must hold positive"),
    "geometry-negative-block": ({"geometry": [8, 7, 4, -4, 3]}, "geometry must hold positive"),
    "geometry-negative-nnz": ({"geometry": [8, 7, 4, 4, -3]}, "geometry must hold positive"),
    "geometry-other-nnz": ({"geometry": [8, 7, 4, 4, 5]}, "must be"),
    "geometry-other-block": ({"geometry": [8, 7, 2, 4, 3]}, "must be"),
    "geometry-other-shape": ({"geometry": [16, 7, 4, 4, 3]}, "must be"),
    "geometry-past-int32": ({"geometry": [8, 7, 4, 4, 2**40]}, "must be"),
    "geometry-overflow": ({"geometry": [2**63 - 1, 2**63 - 1, 4, 4, 3]}, "must be"),
    "index-too-short": ({"index": INDEX[:-4]}, "index must be the packed index"),
    "index-too-long": ({"index": torch.cat((INDEX, INDEX))}, "index must be the packed index"),
    "index-int64": ({"index": INDEX.long()}, "index must be the packed index"),
    "index-float": ({"index": INDEX.float()}, "index must be the packed index"),
    "index-strided": ({"index": torch.stack((INDEX, INDEX), 1)[:, 0]}, "index must be the packed index"),
    "index-two-dimensions": ({"index": INDEX[None]}, "index must be the packed index"),
    "index-meta": ({"index": INDEX.to("meta")}, "index must be on the device"),
    "activation": ({"activation": "tanh"}, "activation must be"),
}


@pytest.mark.parametrize("operator", ["linear", "input_grad", "weight_grad"])
@pytest.mark.parametrize("name", BAD_RAW_CALLS)
def test_raw_operators_check_geometry_and_index(name, operator):
    changes, message = BAD_RAW_CALLS[name]
    if name == "activation":
        operator = "linear"
    arguments = {"index": INDEX, "geometry": GEOMETRY} | changes
    operands = {"linear": (X, VALUES, BIAS), "input_grad": (DY, VALUES), "weight_grad": (DY, X)}[operator]
    with pytest.raises(ValueError, match=message):
        getattr(RAW, operator)(*operands, **arguments)


def test_cuda_on_a_build_without_it_says_how_to_rebuild():
    if block_sparse_native.with_cuda:
        pytest.skip("this build has its CUDA kernels")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for operator, arguments in (
        (RAW.linear.default, (X, VALUES, BIAS, INDEX, GEOMETRY, "none")),
        (RAW.input_grad.default, (DY, VALUES, INDEX, GEOMETRY)),
        (RAW.weight_grad.default, (DY, X, INDEX, GEOMETRY)),
        (RAW.bias_grad.default, (DY,)),
    ):
        with pytest.raises(NotImplementedError, match=r"built without its CUDA kernels.*pip install"):
            operator.redispatch(keys, *arguments)


# Outside autocast


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
def test_mixed_dtypes_are_an_error_as_in_nn_linear(dtype):
    with pytest.raises(BlockSparseError, match="dtype"):
        layer()(torch.randn(2, 8).to(dtype))
    with pytest.raises(RuntimeError, match="dtype"):
        nn.Linear(8, 8)(torch.randn(2, 8).to(dtype))
