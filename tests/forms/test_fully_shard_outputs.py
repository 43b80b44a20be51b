"""Models with several outputs and losses: gradients and outputs are those of one device.

How few units are full meanwhile is in test_fully_shard_memory.
"""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dataparallel.composable import fully_shard
from dataparallel.testing.cases import seeded
from dataparallel.testing.steps import assert_equal
from each_form import graphing_forms
from machine_ranks import on_machines
from sharded_chains import Chain, Layer, assert_same_results, batch_on
from sharded_steps import gradients, on_device, sharded

WIDTH = 6


class Routed(Chain):
    """Each layer has scores beside its output. Returns the last output, and the scores of all layers."""

    def forward(self, x: Tensor) -> Any:
        scores = []
        for layer in self.layers:
            x, score = layer(x)
            scores.append(score)
        return x, *scores


def routed() -> Routed:
    return Routed(*(Layer(lambda y: (torch.tanh(y), y.softmax(-1))) for _ in range(4)))


@pytest.mark.parametrize("order", [[4, 0, 2], [2, 1, 0, 3, 4], [0], [3]], ids=str)
def test_each_loss_may_have_a_backward(order, slots, x):
    """Parameters that no such loss needs have no gradient."""

    def use(model: Any) -> Any:
        leaf = x.clone().requires_grad_()
        losses = [output.square().mean() for output in model(leaf)]
        for at in order:
            losses[at].backward(retain_graph=at != order[-1])
        return [*losses, leaf.grad]

    several, one = (on_device(seeded(routed), slots[0]) for _ in range(2))
    assert_same_results((sharded(several, slots), one), use)


class Gives(nn.Module):
    """Returns what a function makes of its parameter."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(4, WIDTH))

    def units(self) -> list[Any]:
        return []

    def forward(self, x: Tensor) -> Any:
        return self.function(self.weight)


OF_PARAMETERS: dict[str, Any] = {
    "one": lambda weight: weight,
    "a view": lambda weight: weight[1:],
    "without a graph": lambda weight: weight.detach(),
    "data": lambda weight: {"data": weight.data},
    "several": lambda weight: (weight, weight, weight.sum(1)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("below", [False, True], ids=["the root", "a unit below"])
@pytest.mark.parametrize("kind", OF_PARAMETERS)
def test_parameters_that_are_outputs_keep_their_values(kind, below, mode, slots):
    """The memory of the full ones is freed."""

    def build() -> Any:
        gives = Gives(OF_PARAMETERS[kind])
        return Chain(gives, own=0) if below else gives

    several, one = (on_device(seeded(build), slots[0]) for _ in range(2))
    sharded(several, slots)
    x = torch.ones(1, WIDTH, dtype=torch.float64, device=slots[0])  # for one replica
    with mode():
        found, expected = several(x), one(x)
        several.reshard()
        several(x)
        assert_equal(found, expected, "output", atol=0)


class Towers(nn.Module):
    """Two outputs that share nothing, as of a generator and a discriminator, or of a policy and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


@graphing_forms
@pytest.mark.parametrize("first", [0, 1])
def test_losses_that_share_nothing_have_backwards_of_their_own(first, form, slots):
    """One after the other, without ``retain_graph``; what the other loss needs has no gradient before."""
    found = []
    for use in (lambda model: form(model, slots), lambda model: model):
        model = on_device(seeded(Towers), slots[0])
        called = use(model)
        outputs = called(batch_on(slots))
        for at in (first, 1 - first):
            outputs[at].square().mean().backward()
            found.append([*gradients(model).values()])
    assert_equal(found[:2], found[2:], "gradients", atol=1e-9)
    assert None in found[0]
    assert None not in found[1]


def trained_with_a_late_gradient(rank: int, devices: list[Any]) -> list[Tensor]:
    """The gradients. On one machine the gradient of the first output comes late, on the other that of the second."""
    model, mesh = on_device(seeded(Towers), devices[0]), init_device_mesh("cpu", (2,))
    for unit in (model.a, model.b, model):
        fully_shard(unit, devices=devices, mesh=mesh)
    for _ in range(2):
        outputs = [*model(batch_on(devices))]
        outputs[rank] = outputs[rank] * 1
        outputs[rank].grad_fn._set_sequence_nr(0)  # after all other nodes that are ready in this thread
        outputs[rank].register_hook(lambda grad: time.sleep(0.2))
        sum(output.square().mean() for output in outputs).backward()
    return [parameter.grad.full_tensor("cpu") for parameter in model.parameters()]


def test_machines_gather_in_one_order_whichever_gradient_comes_first():
    first, second = on_machines(trained_with_a_late_gradient)
    assert_equal(first, second, "gradients", atol=1e-9)
