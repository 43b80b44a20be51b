"""Tensors made like a sharded one lie as it does, and a draw is that of the whole tensor on one device, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, ShardedTensor
from dataparallel.sharded.placements import over_of
from sharding import full, sharded


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_those_of_its_shape_are_divided_like_it(slots: list, placement: Any) -> None:
    divided = sharded(torch.rand(5, 3), slots, placement)
    for made in (torch.zeros_like(divided, dtype=torch.int32), divided.new_full((5, 3), 2.0)):
        assert isinstance(made, ShardedTensor)
        assert (made.devices, made.placement) == (divided.devices, divided.placement)
        assert [shard.device for shard in made.shards] == [shard.device for shard in divided.shards]


def test_those_of_other_shapes_are_plain_on_the_first_owner(slots: list, root: torch.device) -> None:
    made = sharded(torch.rand(5, 3), slots).new_zeros(2)
    assert type(made) is torch.Tensor
    assert made.device == root


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda t: t.normal_(1, 2),
    "uniform_": lambda t: t.uniform_(-1, 1),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "exponential_": lambda t: t.exponential_(),
    "log_normal_": lambda t: t.log_normal_(),
    "cauchy_": lambda t: t.cauchy_(),
    "geometric_": lambda t: t.geometric_(0.3),
    "random_": lambda t: t.random_(3, 100),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 10),
    "init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "init.xavier_normal_": nn.init.xavier_normal_,
    "init.trunc_normal_": nn.init.trunc_normal_,
    "init.constant_": lambda t: nn.init.constant_(t, 3),
}


def drawn(draw: Callable[[Tensor], Any], seed: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """What is drawn with this seed, and what is drawn next."""
    torch.manual_seed(seed)
    if x.device.type != "cpu":
        torch.get_device_module(x.device).manual_seed_all(seed)
    return full(draw(x)).cpu(), torch.rand(3, device=x.device).cpu()


@pytest.mark.slots(4)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_it_equals_one_device(
    root: torch.device, on_owners: Callable[[Callable], list], name: str, placement: Any
) -> None:
    """Over machines the first one's numbers count. Each machine's own generators advance as they do by one draw."""
    alone = [drawn(DRAWS[name], 3 + rank, torch.zeros(7, 5, device=root)) for rank in range(2)]

    def draw(owners: Any) -> None:
        rank = 0 if over_of(owners) is None else over_of(owners).rank
        found, after = drawn(DRAWS[name], 3 + rank, sharded(torch.zeros(7, 5), owners, placement))
        assert torch.equal(found, alone[0][0])
        # This one draws as often as it has to for the first machine.
        assert name == "init.trunc_normal_" or torch.equal(after, alone[rank][1])

    on_owners(draw)


@pytest.mark.slots(4)
def test_it_takes_the_generator_that_is_passed(root: torch.device, on_owners: Callable[[Callable], list]) -> None:
    """Over machines that of the first one counts."""
    expected = torch.zeros(7, device=root).normal_(generator=torch.Generator(root).manual_seed(5)).cpu()

    def draw(owners: Any) -> None:
        rank = 0 if over_of(owners) is None else over_of(owners).rank
        generator = torch.Generator(owners[0]).manual_seed(5 + rank)
        assert torch.equal(full(sharded(torch.zeros(7), owners).normal_(generator=generator)), expected)

    on_owners(draw)
