"""Tensors made like a sharded one lie as it does."""

from typing import Any

import pytest
import torch

from dataparallel.sharded import Replicate, Shard, ShardedTensor
from sharding import full, sharded


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        torch.zeros_like,
        torch.ones_like,
        lambda t: torch.full_like(t, 7),
        lambda t: torch.zeros_like(t, dtype=torch.int32),
        lambda t: t.new_zeros(t.shape),
        lambda t: t.new_ones(5, 3, dtype=torch.float64),
        lambda t: t.new_full((5, 3), 2.0),
        lambda t: torch.zeros_like(t, device=t.device),
        lambda t: t.new_empty_strided(t.shape, t.stride()).fill_(1),
    ],
)
def test_those_of_its_shape_are_divided_like_it(slots: list, placement: Any, make: Any) -> None:
    x = torch.rand(5, 3)
    divided = sharded(x, slots, placement)
    made, expected = make(divided), make(x)
    assert isinstance(made, ShardedTensor)
    assert (made.devices, made.placement) == (divided.devices, divided.placement)
    assert [shard.device for shard in made.shards] == [shard.device for shard in divided.shards]
    assert made.dtype == expected.dtype
    assert torch.equal(full(made), expected)


def test_those_of_other_shapes_are_plain_on_the_first_owner(slots: list, root: torch.device) -> None:
    made = sharded(torch.rand(5, 3), slots).new_zeros(2)
    assert type(made) is torch.Tensor
    assert made.device == root


def test_on_the_cpu_the_owners_stay_known(slots: list) -> None:
    divided = sharded(torch.rand(5, 3), slots)
    made = torch.zeros_like(divided, device="cpu")
    assert isinstance(made, ShardedTensor)
    assert made.devices == divided.devices
    assert {shard.device.type for shard in made.shards} == {"cpu"}


def test_fills_write_to_every_part(slots: list, root: torch.device) -> None:
    divided = sharded(torch.rand(5, 3), slots)
    assert torch.equal(full(divided.fill_(3)), torch.full((5, 3), 3.0))
    assert torch.equal(full(divided.fill_(torch.tensor(2.0, device=root))), torch.full((5, 3), 2.0))
    assert torch.equal(full(divided.zero_()), torch.zeros(5, 3))
