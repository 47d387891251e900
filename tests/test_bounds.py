"""The suite's own measure notices what it is for: one wrong element, one wrong block, a NaN."""

from __future__ import annotations

import pytest
import torch
from bounds import assert_within_bound, by_tile


def results() -> list[torch.Tensor]:
    reference = torch.randn(64, 96, dtype=torch.float64)
    dense = reference.float()
    return [by_tile(tensor, (32, 32)) for tensor in (dense.clone(), dense, reference, reference.abs())]


def test_right_results_pass():
    assert_within_bound(*results())


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e-5], ids=str)
def test_one_wrong_element_fails(wrong):
    ours, *rest = results()
    ours[4, 17] += wrong
    with pytest.raises(AssertionError, match=r"1 of 6 output blocks .* the first is 4"):
        assert_within_bound(ours, *rest)


def test_large_error_of_dense_in_another_block_excuses_nothing():
    ours, dense, *rest = results()
    dense[0, 0] += 1
    ours[1, 0] += 0.5
    with pytest.raises(AssertionError, match="the first is 1"):
        assert_within_bound(ours, dense, *rest)


def test_nan_of_dense_excuses_nothing():
    ours, dense, *rest = results()
    dense[2] = torch.nan
    with pytest.raises(AssertionError, match="the first is 2"):
        assert_within_bound(ours, dense, *rest)
