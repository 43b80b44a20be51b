"""The small layers for tests of sharding: their parts, and that one seed gives the same weights everywhere."""

import pytest
import torch
from torch import nn

from at_once import in_threads
from dataparallel.composable import fully_shard
from dataparallel.testing import MLP, RMSNorm, StackedMLP
from dataparallel.testing.cases import generator

SEEDED = {
    "MLP": MLP,
    "MLP without biases": lambda device=None, seed=0: MLP(device, bias=False, seed=seed),
    "StackedMLP": StackedMLP,
}
every_seeded = pytest.mark.parametrize("make", SEEDED.values(), ids=SEEDED)


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    assert list(one.state_dict()) == list(other.state_dict())
    for name, value in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_rms_norm_is_torchs():
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=generator(0))
    ours, theirs = RMSNorm(8, dtype=torch.float64), nn.RMSNorm(8, eps=1e-6, dtype=torch.float64)
    for norm in (ours, theirs):
        with torch.no_grad():
            norm.weight.copy_(torch.arange(8) - 3.5)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-12, rtol=0)


def test_the_layers_of_mlp_and_their_sizes():
    names = {name: tuple(value.shape) for name, value in MLP("cpu").named_parameters()}
    assert names == {"net1.weight": (16, 10), "net1.bias": (16,), "net2.weight": (10, 16), "net2.bias": (10,)}
    assert [*dict(MLP("cpu", bias=False).named_parameters())] == ["net1.weight", "net2.weight"]
    assert [*dict(MLP("cpu").named_children())] == ["net1", "relu", "net2"]


@every_seeded
def test_one_seed_gives_the_same_weights_and_the_generator_stays_as_it_is(make):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, other, third = (make("cpu", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_weights(one, other)
    assert not any(map(torch.equal, one.parameters(), third.parameters()))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.reset_parameters()
    assert_same_weights(one, other)


@every_seeded
def test_each_slot_gets_the_same_weights(make, slots):
    with torch.device(slots[-1]):
        placed = make()
    assert {parameter.device for parameter in placed.parameters()} == {torch.device(slots[-1])}
    assert_same_weights(make("cpu"), placed.to("cpu"))


@every_seeded
def test_threads_that_build_at_the_same_time_get_the_same_weights(make):
    made = []

    def build(_, start):
        start.wait()
        made.extend(make("cpu") for _ in range(20))

    in_threads(4, build)
    assert len(made) == 80
    for other in made:
        assert_same_weights(made[0], other)


@every_seeded
def test_on_meta_nothing_is_drawn_until_there_is_memory(make, root):
    model = make("meta", seed=3)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.reset_parameters()
    model.to_empty(device=root)
    model.reset_parameters()
    assert_same_weights(make("cpu", seed=3), model.to("cpu"))


@every_seeded
def test_sharded_weights_are_those_of_one_device(make, slots):
    model = fully_shard(make("meta", seed=3), devices=slots)
    model.to_empty(device=slots[0])
    model.reset_parameters()
    expected = make("cpu", seed=3).state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor("cpu"), expected[name]), name
