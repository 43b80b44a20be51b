"""A module whose gradients may wait on slots, and its twin on one device, in the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kept import assert_same, build, gradients, kept_on_slots, loss, numbers, tensors_of, with_kept_replicas
from torch import Tensor, nn


class Both:
    """``net`` has kept replicas, which ``wrapped`` calls; ``twin`` is the same module on one device."""

    def __init__(self, build: Callable[[torch.device], Any], slots: list, root: torch.device) -> None:
        self.net, self.twin = build(root), build(root)
        self.wrapped = with_kept_replicas(self.net, slots)
        self.slots, self.root = slots, root

    @property
    def modules(self) -> tuple[Any, Any]:
        return self.net, self.twin

    @property
    def calls(self) -> tuple[tuple[Any, Any], ...]:
        """What is called, and which module that is."""
        return (self.wrapped, self.net), (self.twin, self.twin)

    def x(self, step: int = 0, **options: Any) -> Tensor:
        """A batch of another size for each step, which not all divide evenly."""
        return numbers(self.root, 2 * len(self.slots) + step, seed=step, **options)

    def sums_are(self, are_on: bool) -> None:
        tensors_of(self.wrapped).sums.are_on = are_on

    def backward(self, x: Tensor, are_on: bool = True, names: Sequence[str] | None = None, **options: Any) -> None:
        """A forward and its backward, which writes the ``.grad`` of all parameters or of those that are named."""
        self.sums_are(are_on)
        for call, module in self.calls:
            loss(call(x)).backward(inputs=self.inputs_of(module, names), **options)

    @staticmethod
    def inputs_of(module: nn.Module, names: Sequence[str] | None) -> list[Tensor] | None:
        return None if names is None else [module.get_parameter(name) for name in names]

    def learn(self) -> None:
        """The steps in which the order of gradients is learnt."""
        for _ in range(2):
            self.backward(self.x())
            self.zero_grad()

    def zero_grad(self) -> None:
        for module in self.modules:
            module.zero_grad()

    def kept(self) -> int:
        """How many gradients wait."""
        return kept_on_slots(self.wrapped)

    def compare(self) -> None:
        """Asserts that both have the same gradients."""
        assert_same(*([None if g is None else g.detach() for g in gradients(module)] for module in self.modules))


@pytest.fixture
def both_of(slots: list, root: torch.device) -> Callable[..., Both]:
    """Makes both of what a function builds on a device."""
    return lambda build=build: Both(build, slots, root)


@pytest.fixture
def both(both_of: Callable[..., Both]) -> Both:
    return both_of()
