"""What is a refusal, and what two tensors with the same bits are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel.sharded import Shard, distribute_tensor
from dataparallel.testing import Rank
from dataparallel.testing.ranks import on_threads
from dataparallel.testing.sharding.differences import same_bits
from dataparallel.testing.sharding.on_devices import OnDevices
from dataparallel.testing.sharding.targets import target_of

pytestmark = [pytest.mark.devices("cpu"), pytest.mark.usefixtures("gathers_are_errors")]


def error_of(function: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (which one is what is tested)
        function(*args)
    return caught.value


def test_refusals_of_sharded_tensors() -> None:
    target = OnDevices(["cpu", "cpu"])
    rows = distribute_tensor(torch.ones(2, 2), ["cpu", "cpu"])
    columns = distribute_tensor(torch.ones(2, 2), ["cpu", "cpu"], Shard(1))
    others = distribute_tensor(torch.ones(2, 2), ["cpu"])
    assert target.is_refusal(error_of(torch.mm, rows, rows))
    assert target.is_refusal(error_of(torch.add, rows, columns))
    assert target.is_refusal(error_of(torch.add, rows, others))
    assert target.is_refusal(error_of(torch.ones(2, 2).add_, rows))
    assert not target.is_refusal(error_of(torch.add, rows, "text"))
    assert not target.is_refusal(error_of(torch.mm, torch.ones(2, 3), torch.ones(2, 3)))
    assert not target.is_refusal(error_of(distribute_tensor, torch.ones(2), ["cpu"], Shard(7)))


def _refusals(rank: Rank) -> list[bool]:
    from torch.distributed.tensor import distribute_tensor

    target = target_of(rank.mesh())
    x = distribute_tensor(torch.ones(2, 2), target.mesh, [Shard(0)], src_data_rank=None)
    return [
        target.is_refusal(error_of(torch.add, x, torch.ones(2, 2))),
        target.is_refusal(error_of(torch.Tensor.unfold, x, 0, 1, 1)),
        target.is_refusal(error_of(torch.mm, torch.ones(2, 3), torch.ones(2, 3))),
        target.is_refusal(error_of(torch.add, x, "text")),
    ]


def test_refusals_of_dtensors() -> None:
    assert on_threads(_refusals, ranks=2) == [[True, True, False, False]] * 2


def test_the_same_bits() -> None:
    x = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    assert same_bits(x, x.clone())
    assert same_bits(x.T, x.T.clone())
    assert same_bits(torch.tensor(1 + 2j).conj(), torch.tensor(1 - 2j))
    assert same_bits(torch.ones(0, 2), torch.zeros(0, 2))
    assert not same_bits(x, x[:1])
    assert not same_bits(torch.ones(2), torch.ones(2, dtype=torch.int32))
    assert not same_bits(torch.ones(2), torch.tensor([1.0, 1.0 + 2**-23]))
