"""Chains of small layers, and a step of them as a list of results, for the tests of `fully_shard`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import assert_equal, mean_square_loss
from sharded_steps import Model, assert_all_sharded, gradients, on_device, sharded, state, whole


class Chain(nn.Module):
    """Layers one after the other, of which the first `own` belong to the model and the others are units."""

    def __init__(self, *layers: nn.Module, own: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.own = own

    def units(self) -> list[Any]:
        return [*self.layers][self.own :]

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """A linear layer of width 6 and what ``after`` makes of it."""

    def __init__(self, after: Callable[[Tensor], Any] = torch.tanh, before: Callable[[Any], Tensor] | None = None):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.after, self.before = after, before

    def forward(self, x: Any) -> Any:
        return self.after(self.linear(x if self.before is None else self.before(x)))


def chain(*layers: Callable[[], nn.Module], own: int = 1) -> Model:
    return Model(seeded(lambda: Chain(*(make() for make in layers), own=own)), numbers(6))


PLAIN = chain(Layer, Layer, Layer)


def pair_on(slots: Sequence[Any]) -> tuple[Any, Any]:
    """A chain that is sharded, and its twin on one device."""
    return sharded(on_device(PLAIN.build, slots[0]), slots), on_device(PLAIN.build, slots[0])


def batch_on(slots: Sequence[Any]) -> Tensor:
    """A batch for it that does not divide evenly."""
    (x,), _ = numbers(6)(2 * len(slots) + 1, 0)
    return x.to(slots[0])


def assert_same_results(pair: tuple[Any, Any], use: Callable[[Any], Any]) -> None:
    """Asserts that ``use`` of a model returns the same and leaves the same values and gradients."""
    found, expected = ([whole(use(model)), state(model), gradients(model)] for model in pair)
    assert_equal(found, expected, "results", atol=1e-9)
    assert_all_sharded(pair[0])


def forward_backward(model: Any, x: Tensor) -> list[Any]:
    """The output and the gradient of the input of one step."""
    leaf = x.clone().requires_grad_()
    output = model(leaf)
    mean_square_loss(output).backward()
    return [output, leaf.grad]
