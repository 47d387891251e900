"""Least squares on the kept blocks, and the choice of blocks by the error that remains after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import BlockSparseError
from ..pattern import block_grid
from .calibration import Moments

DAMPING = 0.01
# Of the inverse Hessians that block rows are pruned with side by side.
_WORKSPACE_BYTES = 2**28


@dataclass(frozen=True)
class Regression:
    """The dense layer's output as a quadratic in the new weights V: tr((V - target) hessian (V - target)ᵀ) + constant.

    With z the layer's input in the dense model, x its input now, and W, b its dense weights, the error is
    E ||V x + c - W z - b||² + damping ||V - W||². Where the layer has a bias, c is free and eliminated, by centring.

    Attributes:
        hessian: float64 [I, I], positive definite.
        target: float64 [O, I], the minimiser with all blocks kept.
        input_mean: float64 [I], of x; zero without a bias.
        output_mean: float64 [O], of W z + b; zero without a bias.
        has_bias: whether c is free.
    """

    hessian: Tensor
    target: Tensor
    input_mean: Tensor
    output_mean: Tensor
    has_bias: bool

    def bias(self, weight: Tensor) -> Tensor | None:
        """The best c [O] for new weights [O, I]; None where the layer has no bias."""
        return self.output_mean - weight @ self.input_mean if self.has_bias else None


def build_regression(
    weight: Tensor, bias: Tensor | None, now: Moments, cross: Moments | None = None, damping: float = DAMPING
) -> Regression:
    """The regression of one layer.

    Args:
        weight: [O, I], dense.
        bias: [O] or None.
        now: Σ x xᵀ of the input x.
        cross: Σ x zᵀ with the input z in the dense model; ``now`` if not given, so that x = z.
        damping: added to the diagonal, as a share of its mean; pulls towards ``weight``.

    Raises:
        BlockSparseError: the calibration has no token for this layer, or a value that is not finite.
    """
    if not now.tokens > 0:
        raise BlockSparseError("calibration must give every layer tokens, got 0")
    xx, xz = (moments.total / now.tokens for moments in (now, cross or now))
    if not (torch.isfinite(xx).all() and torch.isfinite(xz).all()):
        raise BlockSparseError("calibration must give every layer finite inputs, got inf or nan")
    weight = weight.double()
    hessian, product = xx[:-1, :-1].clone(), weight @ xz[:-1, :-1].t()
    input_mean, output_mean = torch.zeros_like(xx[:-1, -1]), torch.zeros_like(weight[:, 0])
    if bias is not None:
        input_mean = xx[:-1, -1]
        dense_mean = weight @ xz[-1, :-1]
        hessian -= torch.outer(input_mean, input_mean)
        product -= torch.outer(dense_mean, input_mean)
        output_mean = dense_mean + bias.double()
    scale = hessian.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    hessian.diagonal().add_(damping * scale)
    product += damping * scale * weight
    target = torch.cholesky_solve(product.t(), _cholesky(hessian)).t()
    return Regression(hessian, target, input_mean, output_mean, bias is not None)


def refit(regression: Regression, mask: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """The weights that minimise the regression's error on the kept blocks: float64 [O, I], zero elsewhere.

    One damped least-squares problem a block row, on its kept input features S: V_S = (T H)_S H_SS⁻¹.

    Args:
        regression: of the layer.
        mask: bool [R, C], the kept blocks.
        block_shape: (bh, bw).
    """
    height, width = block_shape
    product = regression.target @ regression.hessian
    result = torch.zeros_like(product)
    features = mask.to(product.device).repeat_interleave(width, 1)[:, : product.shape[1]]
    # Rows that keep the same blocks share a factorisation.
    for kept in torch.unique(features, dim=0):
        block_rows = (features == kept).all(1)
        inside = kept.nonzero()[:, 0]
        if inside.numel() == 0:
            continue
        rows = block_rows.repeat_interleave(height)[: product.shape[0]].nonzero()[:, 0]
        factor = _cholesky(regression.hessian[inside][:, inside])
        result[rows[:, None], inside] = torch.cholesky_solve(product[rows][:, inside].t(), factor).t()
    return result


def removal_costs(regression: Regression, block_shape: tuple[int, int]) -> Tensor:
    """What each block is worth: the error that its removal adds when the blocks left in its row are refitted.

    In every block row blocks are removed one by one, the cheapest first, and the row is refitted after each: with A the
    inverse Hessian of what is left, the removal of block c costs tr(V_c A_cc⁻¹ V_cᵀ), and V and A change by a product
    of rank bw. So the cost accounts for what earlier removals did, and for what correlated inputs can take over.

    Source: optimal brain surgeon, Hassibi & Stork, 1992; for groups of weights and per-row reconstruction, Frantar &
    Alistarh, "Optimal Brain Compression", 2022, arXiv:2208.11580.

    Args:
        regression: of the layer.
        block_shape: (bh, bw).

    Returns:
        float32 [R, C] on the CPU. Within a row costs rise strictly in the order of removal, so that the highest n of
        the grid are what is left of a greedy removal in every row.
    """
    height, width = block_shape
    outputs, inputs = regression.target.shape
    rows, cols = block_grid((outputs, inputs), block_shape)
    # Past the edge the weights are zero and the inputs uncorrelated: such features cost nothing.
    missing = cols * width - inputs
    inverse = pad(torch.cholesky_inverse(_cholesky(regression.hessian)), (0, missing, 0, missing))
    inverse.diagonal()[inputs:] = inverse.diagonal()[:inputs].mean()
    inverse = inverse.float()
    weight = pad(regression.target, (0, missing, 0, rows * height - outputs)).float().view(rows, height, cols * width)
    chunk = max(1, _WORKSPACE_BYTES // (4 * inverse.numel()))
    scores = [_remove_all(part, inverse, width) for part in weight.split(chunk)]
    return torch.cat(scores).cpu()


def _remove_all(weight: Tensor, inverse: Tensor, width: int) -> Tensor:
    """Removes every block of n block rows: weights [n, bh, C * bw], inverse Hessian [C * bw, C * bw] -> [n, C]."""
    count, height, features = weight.shape
    left = features // width  # blocks that a row still has
    every = torch.arange(count, device=weight.device)
    weight = weight.clone()
    inverse = inverse.expand(count, -1, -1).clone()
    names = torch.arange(left, device=weight.device).expand(count, -1)
    alive = torch.ones((count, left), dtype=torch.bool, device=weight.device)
    scores = weight.new_zeros((count, left))
    last = weight.new_zeros(count)
    identity = torch.eye(width, device=weight.device)
    for _ in range(left):
        blocks = names.shape[1]
        diagonal = inverse.view(count, blocks, width, blocks, width).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        diagonal = torch.where(alive[..., None, None], diagonal, identity)
        factor = torch.linalg.cholesky_ex(diagonal)[0]
        # |L⁻¹ Vᵀ|² = tr(V A⁻¹ Vᵀ), [n, blocks, bw, bh]
        solved = torch.linalg.solve_triangular(
            factor, weight.view(count, height, blocks, width).permute(0, 2, 3, 1), upper=False
        )
        costs = torch.nan_to_num(solved.square().sum((2, 3)), nan=math.inf)
        costs = costs.masked_fill(~alive, math.inf)
        cost, chosen = costs.min(1)
        # Nothing is left but what rounding made indefinite: it goes last, in any order.
        lost = ~alive[every, chosen]
        chosen = torch.where(lost, alive.float().argmax(1), chosen)
        last = torch.maximum(
            cost.clamp_max(torch.finfo(cost.dtype).max / 4), torch.nextafter(last, last.new_tensor(math.inf))
        )
        scores[every, names[every, chosen]] = last
        column = inverse.view(count, features, blocks, width)[every, :, chosen]  # [n, features, bw]
        step = torch.linalg.solve_triangular(factor[every, chosen], column.transpose(1, 2), upper=False)
        inverse.baddbmm_(step.transpose(1, 2), step, alpha=-1)
        weight.baddbmm_(solved[every, chosen].transpose(1, 2), step, alpha=-1)
        alive[every, chosen] = False
        remaining = int(alive[0].sum())
        if 0 < remaining <= 0.75 * blocks:
            # What has been removed is zero by now: leaving it out makes the rest of the work a third.
            kept = alive.nonzero()[:, 1].view(count, remaining)
            names, alive = names.gather(1, kept), torch.ones_like(kept, dtype=torch.bool)
            inside = (kept[..., None] * width + torch.arange(width, device=kept.device)).view(count, -1)
            features = inside.shape[1]
            weight = weight.gather(2, inside[:, None].expand(-1, height, -1))
            inverse = inverse.gather(1, inside[..., None].expand(-1, -1, inverse.shape[2]))
            inverse = inverse.gather(2, inside[:, None].expand(-1, features, -1))
    return scores


def relative_output_error(
    weight: Tensor,
    bias: Tensor | None,
    new_weight: Tensor,
    new_bias: Tensor | None,
    dense: Moments,
    now: Moments | None = None,
    cross: Moments | None = None,
) -> float:
    """||V x + c - W z - b|| / ||W z + b|| over the calibration tokens, from the moments alone.

    Args:
        weight, bias: W [O, I] and b [O] of the dense layer.
        new_weight, new_bias: V [O, I] and c [O].
        dense: Σ z zᵀ of the input in the dense model.
        now: Σ x xᵀ of the input in the sparse model; the dense one if not given.
        cross: Σ x zᵀ.
    """
    before, after = _extended(weight, bias), _extended(new_weight, new_bias)
    zz = dense.total
    energy = ((before @ zz) * before).sum()
    xx = zz if now is None else now.total
    zx = zz if cross is None else cross.total.t()
    error = ((after @ xx) * after).sum() - 2 * ((before @ zx) * after).sum() + energy
    return float((error.clamp_min(0) / energy.clamp_min(torch.finfo(torch.float64).tiny)).sqrt())


def _extended(weight: Tensor, bias: Tensor | None) -> Tensor:
    weight = weight.double()
    column = weight.new_zeros(weight.shape[0]) if bias is None else bias.double()
    return torch.cat((weight, column[:, None]), 1)


def _cholesky(matrix: Tensor) -> Tensor:
    """The factor of a positive definite matrix; where rounding spoils that, of one with a heavier diagonal."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    boost = 1e-8
    while int(info) != 0:
        if boost > 1:
            raise BlockSparseError(
                "calibration must give a positive definite Hessian, got one that damping cannot mend"
            )
        factor, info = torch.linalg.cholesky_ex(
            matrix
            + boost * matrix.diagonal().mean() * torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
        )
        boost *= 10
    return factor


__all__ = ["DAMPING", "Regression", "build_regression", "refit", "relative_output_error", "removal_costs"]
