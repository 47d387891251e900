"""SciPy and NumPy round trips of BlockSparseMatrix."""

import sys

import numpy as np
import pytest
import torch
from cases import permuted

from pytorch_block_sparse import BlockPattern, BlockSparseError, BlockSparseMatrix
from pytorch_block_sparse.optional import MissingPackageError

sparse = pytest.importorskip("scipy.sparse")


def make_matrix(dtype=torch.float32, shape=(48, 80), block=(16, 8), order=lambda pattern: pattern):
    pattern = order(BlockPattern.random(shape, 0.4, block))
    matrix = BlockSparseMatrix(pattern, torch.randn(pattern.nnz, *block).to(dtype))
    return BlockSparseMatrix.from_dense(matrix.to_dense(), pattern=pattern)  # zero past the edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [lambda pattern: pattern, permuted], ids=["row-order", "permuted"])
def test_scipy_round_trip(dtype, order):
    matrix = make_matrix(dtype, order=order)
    bsr = matrix.to_scipy()
    assert type(bsr) is sparse.bsr_matrix and bsr.blocksize == (16, 8) and bsr.nnz == matrix.values.numel()
    assert np.array_equal(bsr.toarray(), matrix.to_dense().numpy())
    back = BlockSparseMatrix.from_scipy(bsr)
    assert back.dtype == dtype and back.block_shape == (16, 8)
    assert torch.equal(back.to_dense(), matrix.to_dense()) and torch.equal(back.pattern.mask(), matrix.pattern.mask())


def test_scipy_shares_values_and_not_indices():
    matrix = make_matrix()
    bsr = matrix.to_scipy()
    bsr.data[0, 0, 0] = 7
    assert matrix.values[0, 0, 0] == 7
    bsr.indices[:] = 0  # the user's own: the pattern does not notice
    matrix.pattern.validate()
    other = make_matrix().to_scipy()
    BlockSparseMatrix.from_scipy(other).values[1, 2, 3] = 9
    assert other.data[1, 2, 3] == 9


def test_a_parameter_is_detached():
    matrix = make_matrix()
    matrix.values.requires_grad_()
    assert np.array_equal(matrix.to_scipy().toarray(), matrix.to_numpy())


@pytest.mark.parametrize("format", ["csr", "csc", "coo", "lil", "dok"])
@pytest.mark.parametrize(
    "array",
    [
        lambda size: sparse.random(*size, density=0.02, rng=0),
        lambda size: sparse.random_array(size, density=0.02, rng=0),
    ],
    ids=["matrix", "array"],
)
def test_other_formats_give_the_blocks_that_they_touch(format, array):
    entries = array((19, 45))
    matrix = BlockSparseMatrix.from_scipy(entries.asformat(format), (4, 8))
    assert np.array_equal(matrix.to_dense().numpy(), entries.toarray())
    assert matrix.block_shape == (4, 8) and 0 < matrix.pattern.density < 0.7
    assert (matrix.block_norm() > 0).all()


def test_equal_places_are_summed():
    entries = sparse.coo_matrix(([1.0, 2.0, 4.0], ([3, 3, 0], [5, 5, 1])), shape=(8, 8))
    assert np.array_equal(BlockSparseMatrix.from_scipy(entries, (4, 4)).to_dense().numpy(), entries.toarray())


def test_a_matrix_without_entries():
    assert BlockSparseMatrix.from_scipy(sparse.csr_matrix((8, 8)), (4, 4)).pattern.nnz == 0
    empty = BlockSparseMatrix.zeros((8, 8), 0, block_shape=(4, 4))
    assert BlockSparseMatrix.from_scipy(empty.to_scipy()).pattern == empty.pattern


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_numpy_round_trip(dtype):
    matrix = make_matrix(dtype, shape=(45, 77))
    array = matrix.to_numpy()
    assert array.shape == (45, 77)
    back = BlockSparseMatrix.from_numpy(array, (16, 8))
    assert back.dtype == dtype and torch.equal(back.to_dense(), matrix.to_dense())
    assert back.pattern == matrix.pattern
    assert torch.equal(BlockSparseMatrix.from_numpy(np.asfortranarray(array), (16, 8)).values, back.values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: make_matrix(shape=(45, 80)).to_scipy(),
            r"to_scipy needs a shape that is a multiple of the block \(16",
        ),
        (lambda: make_matrix(torch.bfloat16).to_scipy(), r"to_scipy needs float32 or float64 .* got torch.bfloat16"),
        (lambda: make_matrix(torch.float16).to_scipy(), r"to_scipy needs float32 or float64 .* got torch.float16"),
        (lambda: make_matrix(torch.bfloat16).to_numpy(), r"to_numpy needs a dtype that NumPy has, got torch.bfloat16"),
        (lambda: BlockSparseMatrix.from_scipy(np.eye(4)), r"matrix must be a SciPy sparse matrix, got ndarray"),
        (
            lambda: BlockSparseMatrix.from_scipy(sparse.eye(4, dtype=np.int32)),
            r"matrix must be float32 or float64, got int32",
        ),
        (
            lambda: BlockSparseMatrix.from_scipy(make_matrix().to_scipy(), (8, 8)),
            r"block_shape \(8, 8\) contradicts the pattern's \(16, 8\)",
        ),
        (lambda: BlockSparseMatrix.from_scipy(damaged("column")), r"every block column must be from 0 to 9, got"),
        (lambda: BlockSparseMatrix.from_scipy(damaged("twice")), r"must not hold a block twice"),
        (lambda: BlockSparseMatrix.from_numpy([[1.0]]), r"array must be a floating-point NumPy array .* got list"),
        (lambda: BlockSparseMatrix.from_numpy(np.ones(3)), r"of 2 dimensions, got float64 \[3\]"),
        (lambda: BlockSparseMatrix.from_numpy(np.ones((3, 3), int)), r"of 2 dimensions, got int64 \[3, 3\]"),
        (lambda: BlockSparseMatrix.from_numpy(np.ones((3, 3))[::-1]), r"without negative strides, got float64"),
    ],
    ids=[
        *("shape", "bfloat16", "float16", "numpy-bfloat16", "no-matrix", "integers", "block", "column", "twice"),
        *("list", "vector", "integer-array", "negative-strides"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(BlockSparseError, match=message):
        call()


def damaged(how):
    bsr = make_matrix().to_scipy()
    bsr.indices[:] = 99 if how == "column" else 0
    return bsr


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(MissingPackageError, match=r"the package scipy, .* pip install 'pytorch_block_sparse\[scipy\]'"):
        make_matrix().to_scipy()
