"""Weights that consist of other tensors, or have tensors in attributes, are on each slot what they are on one device.

So frozen quantised layers serve in all replicas, and adapters beside them are trained. `fully_shard` refuses them.
"""

from collections.abc import Callable
from operator import is_

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from each_form import Form, replicating_forms
from wrapper_tensors import LAYERS, Adapted, Batch, Quantised, QuantState, adapted


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Callable[[Tensor], nn.Module]:
    """A function from values to a frozen layer of one of the kinds."""
    return LAYERS[request.param]


@pytest.fixture
def x(slots: list, root: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * len(slots) + 1, 4, dtype=torch.float64, generator=generator).to(root)


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in net.parameters()]


@pytest.fixture
def pair(form: Form, layer: Callable, slots: list, root: torch.device) -> tuple:
    """A net with adapters on the slots, the module behind it, and its twin on one device."""
    net = adapted(layer, root)
    return form(net, slots), net, adapted(layer, root)


@replicating_forms
class TestWeights:
    def test_adapters_are_trained_as_on_one_device(self, pair: tuple, x: Tensor) -> None:
        model, net, twin = pair
        for called, owner in ((model, net), (twin, twin)):
            optimizer = torch.optim.SGD([each for each in owner.parameters() if each.requires_grad], lr=0.1)
            for _ in range(4):
                optimizer.zero_grad()
                called(x).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(gradients(net), gradients(twin))
        torch.testing.assert_close(model(x), twin(x))

    def test_they_serve(self, pair: tuple, x: Tensor, without_graph: Callable) -> None:
        model, _, twin = pair
        with without_graph():
            for _ in range(2):
                torch.testing.assert_close(model(x), twin(x))

    def test_a_change_in_place_is_seen_at_the_next_call(self, pair: tuple, x: Tensor) -> None:
        model, net, twin = pair
        for _ in range(3):
            for each in (net, twin):
                weight = each[2].base.weight
                held = weight if isinstance(weight, Quantised) else weight.state
                while isinstance(held, Quantised | QuantState):
                    held = held.scale
                with torch.no_grad():
                    held.mul_(2)
            torch.testing.assert_close(model(x), twin(x))
            with torch.no_grad():
                torch.testing.assert_close(model(x), twin(x))

    def test_a_replaced_weight_is_seen_at_the_next_call(self, pair: tuple, x: Tensor) -> None:
        model, net, twin = pair
        model(x)
        for each in (net, twin):
            each[0].base, each[2].base = each[2].base, each[0].base
        torch.testing.assert_close(model(x), twin(x))


@replicating_forms
@pytest.mark.parametrize("layer", ["state on the parameter"], indirect=True)
def test_a_replaced_state_is_seen_at_the_next_call(pair: tuple, x: Tensor) -> None:
    model, net, twin = pair
    for scale in (2.0, 3.0):
        for each in (net, twin):
            weight = each[0].base.weight
            values = torch.full((4, 1), scale, dtype=torch.float64, device=weight.device)
            weight.state = QuantState(values, QuantState(values))
        torch.testing.assert_close(model(x), twin(x))


class Halved(nn.Module):
    """Makes wrappers of its rows: an output that is cut from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.device] = []

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        assert isinstance(batch, Batch)
        self.seen.append(batch.scale.device)
        return {"values": batch.plain() / 2, "batch": Batch(batch.numbers, batch.scale / 2)}


@replicating_forms
def test_they_are_inputs_and_outputs(form: Form, slots: list, root: torch.device, x: Tensor) -> None:
    net = Halved()
    output = form(net, slots)(Batch.of(x))
    assert {*map(str, net.seen)} == {*map(str, slots)}
    assert type(output["batch"]) is Batch
    expected = Batch.of(x).plain() / 2
    for found in (output["values"], output["batch"].plain()):
        assert found.device == root
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_fully_shard_refuses_them_by_name(name: str, slots: list, root: torch.device) -> None:
    net = Adapted(LAYERS[name](torch.ones(4, 4, device=root))).to(torch.float64)
    before = dict(net.named_parameters())
    words = "'state', which holds tensors" if name == "state on the parameter" else f"is a {name}"
    with pytest.raises(TypeError, match=rf"'base.weight' .*{words}"):
        fully_shard(net, devices=slots)
    assert all(map(is_, net.parameters(), before.values()))
