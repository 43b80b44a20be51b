"""The models for tests of sharding: their parts, and that one seed gives the same weights everywhere."""

import pytest
import torch
from torch import nn

from dataparallel.composable import fully_shard
from dataparallel.testing import MLP, ModelArgs, RMSNorm, StackedMLP, Transformer
from dataparallel.testing.cases import generator
from each_form import whole

SEEDED = {
    "MLP": MLP,
    "MLP without biases": lambda device=None, seed=0: MLP(device, bias=False, seed=seed),
    "StackedMLP": StackedMLP,
    "Transformer": lambda device=None, seed=0: Transformer(ModelArgs(), device=device, seed=seed),
    "Transformer, untied": lambda device=None, seed=0: Transformer(
        ModelArgs(weight_tying=False), device=device, seed=seed
    ),
}


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


@pytest.mark.parametrize("make", SEEDED.values(), ids=SEEDED)
def test_one_seed_gives_the_same_weights_everywhere(make, slots, root):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    expected, other, third = (make("cpu", seed=seed) for seed in (3, 3, 4))
    assert_same_weights(other, expected)
    drawn = {name: value for name, value in expected.named_parameters() if "norm" not in name}
    assert not any(torch.equal(value, third.state_dict()[name]) for name, value in drawn.items())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.reset_parameters()
    assert_same_weights(other, expected)
    with torch.device(slots[-1]):
        placed = make(seed=3)
    assert {parameter.device for parameter in placed.parameters()} == {torch.device(slots[-1])}
    assert_same_weights(placed.to("cpu"), expected)
    for form in (lambda model: model, lambda model: fully_shard(model, devices=slots)):
        model = form(make("meta", seed=3))
        assert all(parameter.is_meta for parameter in model.parameters())
        model.reset_parameters()
        model.to_empty(device=root)
        model.reset_parameters()
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter).cpu(), expected.state_dict()[name]), name
    assert torch.equal(torch.get_rng_state(), before), "the generator stays as it is"
