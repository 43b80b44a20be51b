"""Errors while replicas are captured: later steps are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import mean_square_loss
from graphed_models import FORMS, Row, SmoothLayer, made, values
from graphed_nets import SETTLE, captured, graphed, reasons
from sharded_steps import Model, moved, whole

pytestmark = [
    pytest.mark.devices("cuda"),
    pytest.mark.parametrize("form", FORMS),
]

STEPS = SETTLE + 4

# It is no attribute of a module, which a captured graph would depend on.
IN_CAPTURE: dict[int, type[Exception]] = {}
"""By index of a device: what is raised by the next capture of the middle layer there."""


@pytest.fixture(autouse=True)
def nothing_fails_afterwards() -> Iterator[None]:
    yield
    IN_CAPTURE.clear()


class MayFail(SmoothLayer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if torch.cuda.is_current_stream_capturing() and x.device.index in IN_CAPTURE:
            raise IN_CAPTURE.pop(x.device.index)("on purpose")
        return y


class Net(Row):
    def __init__(self) -> None:
        super().__init__(SmoothLayer)
        self.layers[1].__class__ = MayFail


class Training:
    """A network and its optimizer, step by step."""

    def __init__(self, form: str, slots: list, **options: Any) -> None:
        self.model, self.slots = Model(seeded(Net), numbers(4)), slots
        self.source, self.network = made(self.model, FORMS[form], slots, **options)
        self.optimizer = torch.optim.SGD(self.source.parameters(), lr=0.1, momentum=0.9)

    def loss(self, number: int) -> Tensor:
        self.optimizer.zero_grad()
        args, kwargs = moved(self.model.batch(4 * len(self.slots), number), self.slots[0])
        return mean_square_loss(self.network(*args, **kwargs))

    def step(self, number: int, failing: Callable[[Tensor], Any] = lambda loss: None) -> Tensor:
        """``failing`` gets the loss before its backward."""
        loss = self.loss(number)
        failing(loss)
        loss.backward()
        self.optimizer.step()
        found: Tensor = whole(loss)
        return found

    def steps(self, first: int, count: int) -> list[Tensor]:
        return [self.step(number) for number in range(first, first + count)]


def expected(form: str, slots: list) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and values after a training without graphs and without errors."""
    training = Training(form, slots)
    return training.steps(0, 2 * STEPS), values(training.source)


@pytest.mark.slots(1, 3)
def test_a_runtime_error_in_a_capture_lets_the_replica_run_as_it_is(form: str, slots: list) -> None:
    IN_CAPTURE[slots[-1].index] = RuntimeError
    training = Training(form, slots, graphs=True)
    found = training.steps(0, 2 * STEPS), values(training.source)
    assert not IN_CAPTURE
    torch.testing.assert_close(found, expected(form, slots), rtol=1e-9, atol=1e-9)
    captures = [replica.captures for replica in graphed(training.network)]
    if len({*slots}) < len(slots):  # the first capture on their device has failed, in whichever slot
        captures.sort(reverse=True)
    assert captures == [1] * (len(slots) - 1) + [0]
    (reason,) = reasons(training.network)
    assert reason.startswith("on purpose (")
    assert "test_errors.py:" in reason


@pytest.mark.slots(1, 3)
def test_another_error_in_a_capture_reaches_the_caller_and_the_next_call_captures(form: str, slots: list) -> None:
    IN_CAPTURE[slots[-1].index] = ArithmeticError
    training = Training(form, slots, graphs=True)
    losses: list[Tensor] = []
    failures = []
    while len(losses) < 2 * STEPS:
        try:
            losses.append(training.step(len(losses)))
        except ArithmeticError:
            failures.append(len(losses))
    assert len(failures) == 1
    torch.testing.assert_close((losses, values(training.source)), expected(form, slots), rtol=1e-9, atol=1e-9)
    assert captured(training.network) >= STEPS * len(slots)
    assert not reasons(training.network)
