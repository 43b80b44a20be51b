"""Reductions of sharded tensors give plain tensors on the first owner, or sharded ones along other dimensions."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.sharded import Replicate, Shard, ShardedTensor
from sharding import full, sharded

WHOLE: dict[str, Any] = {
    "sum": lambda t: t.sum(),
    "sum of int32": lambda t: (t * 3).int().sum(),
    "sum as float32": lambda t: t.sum(dtype=torch.float32),
    "sum of all dimensions": lambda t: t.sum(tuple(range(t.dim())), keepdim=True),
    "mean": lambda t: t.mean(),
    "prod": lambda t: t.prod(),
    "count": lambda t: torch.count_nonzero(t > 0),
    "any": lambda t: (t > 2).any(),
    "all": lambda t: (t > -2).all(),
    "no nan": lambda t: t.isnan().any(),
    "finite": lambda t: t.isfinite().all(),
    "norm": lambda t: t.norm(),
    "norm 1": lambda t: t.norm(1),
    "norm 0": lambda t: torch.linalg.vector_norm(t, 0),
    "norm 3": lambda t: torch.linalg.vector_norm(t, 3, keepdim=True),
    "nansum": lambda t: t.nansum(),
}
NOT_OF_NOTHING: dict[str, Any] = {
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "amax": lambda t: t.amax(keepdim=True),
    "amin": lambda t: t.amin(),
    "norm inf": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "norm -inf": lambda t: torch.linalg.vector_norm(t, float("-inf")),
}


@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    placement=st.sampled_from([Shard(0), Shard(-1), Replicate()]),
    name=st.sampled_from([*WHOLE, *NOT_OF_NOTHING]),
)
def test_those_of_everything_are_plain(
    slots: list, root: torch.device, shape: list[int], placement: Any, name: str
) -> None:
    reduce = {**WHOLE, **NOT_OF_NOTHING}[name]
    x = torch.randn(shape, dtype=torch.float64)
    divided = sharded(x, slots, placement)
    if name in NOT_OF_NOTHING and x.numel() == 0:
        with pytest.raises((RuntimeError, IndexError)):
            reduce(x)
        with pytest.raises((RuntimeError, IndexError)):
            reduce(divided)
        return
    got, expected = reduce(divided), reduce(x)
    assert not isinstance(got, ShardedTensor)
    assert got.device == root
    # Partial sums are added in another order: terms may cancel, and what they have been rounded by stays.
    rounded_by = torch.finfo(torch.float32).eps * float(x.abs().sum()) if name == "sum as float32" else 1e-12
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-12, atol=rounded_by, equal_nan=True)


@pytest.mark.parametrize("placement", [Shard(1), Replicate()], ids=str)
def test_those_along_other_dimensions_are_sharded(slots: list, placement: Any) -> None:
    x = torch.randn(3, 5, 4)
    for dim in (0, -1):
        for got, expected in zip(sharded(x, slots, placement).max(dim), x.max(dim), strict=True):
            assert isinstance(got, ShardedTensor)
            assert torch.equal(full(got), expected)


def test_those_along_the_divided_dimension_are_refused(slots: list) -> None:
    with pytest.raises(TypeError, match=r"divided along 1.*full_tensor"):
        sharded(torch.randn(3, 5), slots, Shard(1)).sum(-1)


def test_a_number_that_is_nan_anywhere_is_found(slots: list) -> None:
    x = torch.randn(7)
    x[6] = float("nan")
    divided = sharded(x, slots)
    assert divided.isnan().any()
    assert divided.max().isnan()
    assert divided.sum().isnan()
