"""Reductions of sharded tensors give plain tensors on the first owner, or sharded ones along other dimensions.

That results are those of plain tensors is in testing/sharding/test_table and in test_every_operator.
"""

from typing import Any

import pytest
import torch

from dataparallel.sharded import Replicate, Shard, ShardedTensor
from sharding import full, sharded


@pytest.mark.parametrize("placement", [Shard(1), Replicate()], ids=str)
def test_those_along_other_dimensions_are_sharded(slots: list, placement: Any) -> None:
    x = torch.randn(3, 5, 4)
    for dim in (0, -1):
        for got, expected in zip(sharded(x, slots, placement).max(dim), x.max(dim), strict=True):
            assert isinstance(got, ShardedTensor)
            assert torch.equal(full(got), expected)


def test_those_along_the_divided_dimension_are_refused(slots: list) -> None:
    with pytest.raises(NotImplementedError, match=r"divided along 1.*full_tensor"):
        sharded(torch.randn(3, 5), slots, Shard(1)).sum(-1)


def test_those_of_everything_are_plain_on_the_first_owner(slots: list, root: torch.device) -> None:
    for found in (sharded(torch.ones(5, 2), slots).sum(), sharded(torch.ones(5, 2), slots, Replicate()).norm(1)):
        assert type(found) is torch.Tensor
        assert found.device == root
        assert found == 10


def test_a_number_that_is_nan_anywhere_is_found(slots: list) -> None:
    x = torch.randn(7)
    x[6] = float("nan")
    divided = sharded(x, slots)
    assert divided.isnan().any()
    assert divided.max().isnan()
    assert divided.sum().isnan()
