"""Reductions of sharded tensors give plain tensors on the first owner.

That results are those of plain tensors is in testing/sharding/test_table and in test_every_operator.
"""

import pytest
import torch

from dataparallel.sharded import Replicate, Shard
from sharding import sharded


@pytest.mark.parametrize("name", ["max", "sum", "amax", "norm", "any", "prod"])
def test_those_along_dimensions_are_refused(slots: list, name: str) -> None:
    for placement in (Shard(1), Replicate()):
        with pytest.raises(NotImplementedError, match=r"aten\..*full_tensor\(\)"):
            getattr(sharded(torch.randn(3, 5, 4), slots, placement), name)(dim=0)


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
