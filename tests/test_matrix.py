"""BlockSparseMatrix: conversions and algebra against the dense matrix."""

from __future__ import annotations

import pytest
import torch
from cases import permuted

from pytorch_block_sparse import BlockPattern, BlockSparseMatrix

SHAPES = pytest.mark.parametrize(
    ("shape", "block"), [((32, 48), (16, 16)), ((30, 41), (16, 16)), ((20, 9), (7, 5))], ids=["fitting", "edges", "odd"]
)


@pytest.fixture(params=["row-order", "permuted"])
def make_matrix(request, device):
    """(shape, block shape) -> a random matrix of density 1/2 and its dense twin."""

    def make(shape: tuple[int, int], block: tuple[int, int]) -> tuple[BlockSparseMatrix, torch.Tensor]:
        pattern = BlockPattern.random(shape, 0.5, block)
        if request.param == "permuted":
            pattern = permuted(pattern)
        dense = torch.zeros(shape, device=device)
        for row, col in pattern.block_coords.tolist():
            place = slice(row * block[0], (row + 1) * block[0]), slice(col * block[1], (col + 1) * block[1])
            dense[place] = torch.randn_like(dense[place])
        return BlockSparseMatrix.from_dense(dense, pattern=pattern), dense

    return make


@SHAPES
def test_dense_round_trip_is_exact(make_matrix, shape, block):
    matrix, dense = make_matrix(shape, block)
    assert torch.equal(matrix.to_dense(), dense)
    for slot, (row, col) in enumerate(matrix.pattern.block_coords.tolist()):
        part = dense[row * block[0] : (row + 1) * block[0], col * block[1] : (col + 1) * block[1]]
        stored = matrix.values[slot]
        assert torch.equal(stored[: part.shape[0], : part.shape[1]], part)
        assert not stored[part.shape[0] :].any() and not stored[:, part.shape[1] :].any()


@SHAPES
def test_to_dense_of_other_values(make_matrix, shape, block):
    matrix, dense = make_matrix(shape, block)
    assert torch.equal(matrix.to_dense(data_replace=2 * matrix.values), 2 * dense)


@SHAPES
def test_from_dense_without_a_choice_keeps_blocks_that_are_not_zero(make_matrix, shape, block):
    matrix, dense = make_matrix(shape, block)
    found = BlockSparseMatrix.from_dense(dense, block)
    assert torch.equal(found.pattern.mask(), matrix.pattern.mask())
    assert torch.equal(found.to_dense(), dense)


def test_from_dense_keeps_the_strongest_blocks(device):
    dense = torch.zeros(6, 6, device=device)
    dense[0, 0], dense[2, 3], dense[5, 5], dense[4, 0:2] = -5, 1, 3, 2  # norms 5, 1, 3 and 2.83
    matrix = BlockSparseMatrix.from_dense(dense, (2, 2), block_count=2)
    assert matrix.pattern.block_coords.tolist() == [[0, 0], [2, 2]]
    assert BlockSparseMatrix.from_dense(dense, (2, 2), block_count=3).pattern.mask()[2, 0]
    assert BlockSparseMatrix.from_dense(dense, (2, 2), block_count=0).pattern.nnz == 0


def test_from_dense_keeps_named_blocks(device):
    dense = torch.randn(6, 6, device=device)
    matrix = BlockSparseMatrix.from_dense(dense, (2, 2), blocks=[(2, 1), (0, 0)])
    assert matrix.pattern.block_coords.tolist() == [[2, 1], [0, 0]]
    assert torch.equal(matrix.values, torch.stack((dense[4:6, 2:4], dense[0:2, 0:2])))


def test_to_dense_and_from_dense_differentiate(device):
    dense = torch.randn(5, 7, dtype=torch.float64, device=device, requires_grad=True)
    pattern = permuted(BlockPattern.random((5, 7), 0.5, (2, 3)))

    def round_trip(dense: torch.Tensor) -> torch.Tensor:
        return BlockSparseMatrix.from_dense(dense, pattern=pattern).to_dense()

    assert torch.autograd.gradcheck(round_trip, dense)


# BSR


def test_bsr_round_trip_shares_memory(device):
    matrix = BlockSparseMatrix.randn((32, 48), 4, block_shape=(16, 16), device=device)
    bsr = matrix.to_bsr()
    assert bsr.layout == torch.sparse_bsr and bsr.values().data_ptr() == matrix.values.data_ptr()
    again = BlockSparseMatrix.from_bsr(bsr)
    assert again.pattern == matrix.pattern and again.values.data_ptr() == matrix.values.data_ptr()


def test_to_bsr_is_the_matrix(make_matrix):
    matrix, dense = make_matrix((32, 48), (16, 16))
    assert torch.equal(matrix.to_bsr().to_dense(), dense)


def test_from_bsr_of_torch(device):
    dense = torch.randn(12, 10, device=device)
    dense[:4, 5:] = 0
    matrix = BlockSparseMatrix.from_bsr(dense.to_sparse_bsr((4, 5)))
    assert matrix.pattern.nnz == 5 and torch.equal(matrix.to_dense(), dense)


# Algebra


@SHAPES
def test_reverse_matmul(make_matrix, shape, block):
    matrix, dense = make_matrix(shape, block)
    x, dy = torch.randn(2, 3, shape[1], device=dense.device), torch.randn(2, 3, shape[0], device=dense.device)
    torch.testing.assert_close(matrix.reverse_matmul(x), x @ dense.t(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(matrix.reverse_matmul(dy, transpose=False), dy @ dense, rtol=1e-4, atol=1e-5)


@SHAPES
def test_matmul_with_output_sparse_support(make_matrix, shape, block):
    matrix, dense = make_matrix(shape, block)
    a, b = torch.randn(9, shape[0], device=dense.device), torch.randn(9, shape[1], device=dense.device)
    expected = BlockSparseMatrix.from_dense(a.t() @ b, pattern=matrix.pattern).values
    torch.testing.assert_close(matrix.matmul_with_output_sparse_support(a, b), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [1, 2, float("inf")], ids=str)
def test_block_norm(make_matrix, p):
    matrix, dense = make_matrix((30, 41), (16, 16))
    expected = torch.stack(
        [
            torch.linalg.vector_norm(dense[16 * row : 16 * row + 16, 16 * col : 16 * col + 16], p)
            for row, col in matrix.pattern.block_coords.tolist()
        ]
    )
    torch.testing.assert_close(matrix.block_norm(p), expected)


def test_block_replace_moves_blocks_and_keeps_data(device):
    matrix = BlockSparseMatrix.ones((6, 6), blocks=[(0, 0), (1, 1), (2, 2)], block_shape=(2, 2), device=device)
    matrix.values *= torch.arange(1, 4, device=device)[:, None, None]
    matrix.block_replace(torch.tensor([[0, 1, 2], [2, 0, 1]]))  # (row, col, slot)
    assert matrix.pattern.block_coords.tolist() == [[0, 0], [2, 0], [0, 1]]
    expected = torch.zeros(6, 6, device=device)
    expected[0:2, 0:2], expected[4:6, 0:2], expected[0:2, 2:4] = 1, 2, 3
    assert torch.equal(matrix.to_dense(), expected)


def test_block_replace_onto_an_edge_clears_what_lies_past_it(device):
    matrix = BlockSparseMatrix.ones((3, 4), blocks=[(0, 0)], block_shape=(2, 2), device=device)
    matrix.block_replace(torch.tensor([[1, 1, 0]]))
    assert matrix.values.tolist() == [[[1, 1], [0, 0]]]


def test_multiply(device):
    matrix = BlockSparseMatrix.randn((6, 6), block_shape=(2, 2), device=device)
    dense = matrix.to_dense()
    matrix.multiply_(-3)
    assert torch.equal(matrix.to_dense(), -3 * dense)


def test_build_coo_block_index():
    matrix = BlockSparseMatrix.zeros((6, 6), blocks=[(2, 1), (0, 0)], block_shape=(2, 2))
    assert matrix.build_coo_block_index().tolist() == [[2, 0], [1, 0]]


# Fillings and attributes


@pytest.mark.parametrize("name", ["zeros", "ones", "randn"])
def test_fillings_stop_at_the_edges(name, device):
    matrix = getattr(BlockSparseMatrix, name)((5, 7), block_shape=(4, 4), device=device, dtype=torch.float64)
    assert matrix.pattern.nnz == 4 and matrix.dtype == torch.float64 and matrix.device.type == device.type
    dense = matrix.to_dense()
    inside = torch.linalg.vector_norm(dense)
    assert float(torch.linalg.vector_norm(matrix.values)) == pytest.approx(float(inside))
    assert (dense == 0).all() if name == "zeros" else (dense != 0).all()
    if name == "ones":
        assert torch.equal(dense, torch.ones_like(dense))


def test_randn_positive():
    assert (BlockSparseMatrix.randn((8, 8), block_shape=(4, 4), positive=True).values >= 0).all()


def test_number_of_blocks():
    assert BlockSparseMatrix.zeros((64, 64), 3, block_shape=(16, 16)).values.shape == (3, 16, 16)
    assert BlockSparseMatrix.zeros((64, 64), 0, block_shape=(16, 16)).values.shape == (0, 16, 16)


def test_reads_like_a_tensor(device):
    values = torch.randn(2, 4, 4, dtype=torch.float64, device=device, requires_grad=True)
    pattern = BlockPattern.from_coords(torch.tensor([[0, 0], [1, 1]]), (5, 8), (4, 4))
    matrix = BlockSparseMatrix(pattern, values)
    assert matrix.shape == matrix.size() == torch.Size([5, 8]) and matrix.size(1) == 8
    assert (matrix.dim(), matrix.ndim, matrix.numel()) == (2, 2, 16 + 4)
    assert (matrix.dtype, matrix.device, matrix.block_shape) == (torch.float64, values.device, (4, 4))
    assert matrix.requires_grad and not matrix.is_sparse and matrix.grad is None
    assert matrix.data.data_ptr() == values.data_ptr() and not matrix.data.requires_grad
    matrix.reverse_matmul(torch.randn(3, 8, dtype=torch.float64, device=device)).sum().backward()
    assert matrix.grad is values.grad is not None
