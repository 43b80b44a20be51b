"""Errors while replicas or units are captured, and while their graphs are launched: later steps are right."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import wait_for_the_engine
from torch import Tensor

from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import mean_square_loss
from graphed_models import FORMS, Row, SmoothLayer, made, values
from graphed_nets import SETTLE, captured, reasons
from sharded_steps import Model, moved, whole

pytestmark = [
    pytest.mark.devices("cuda"),
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.parametrize("form", FORMS),
]

STEPS = SETTLE + 4

# They are no attributes of a module, which a captured graph would depend on.
BETWEEN: list[Callable[[Tensor, int], Tensor]] = []
"""Called before each layer with its input and number. They return the input."""
IN_CAPTURE: dict[int, type[Exception]] = {}
"""By index of a device: what is raised by the next capture of the middle layer there."""


@pytest.fixture(autouse=True)
def nothing_fails_afterwards() -> Iterator[None]:
    yield
    BETWEEN.clear()
    IN_CAPTURE.clear()


class MayFail(SmoothLayer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if torch.cuda.is_current_stream_capturing() and x.device.index in IN_CAPTURE:
            raise IN_CAPTURE.pop(x.device.index)("on purpose")
        return y


class Net(Row):
    def __init__(self, by_parts: bool) -> None:
        super().__init__(SmoothLayer, by_parts=by_parts)
        self.layers[1].__class__ = MayFail

    def between(self, x: Tensor, number: int) -> Tensor:
        for function in BETWEEN:
            x = function(x, number)
        return x


class Training:
    """A network and its optimizer, step by step. ``by_parts``: only the layers can be captured."""

    def __init__(self, form: str, slots: list, by_parts: bool = True, **options: Any) -> None:
        self.model, self.slots = Model(seeded(Net, by_parts), numbers(4)), slots
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


def allocated(slots: list) -> list[int]:
    wait_for_the_engine(slots)
    gc.collect()
    torch.cuda.synchronize()
    return [torch.cuda.memory_allocated(slot) for slot in slots]


def check(
    form: str,
    slots: list,
    is_on: list[bool],
    failing: Callable[[Tensor], Any] = lambda loss: None,
    by_parts: bool = True,
) -> None:
    """Asserts that steps after some that fail compute what they do without failures, and that no memory is lost.

    ``is_on`` is true in the steps that fail. ``failing``, ``by_parts``: see `Training`.
    """
    training = Training(form, slots, by_parts, graphs=True)
    names = {f"layers.{i}" for i in range(3)} if by_parts or form == "fully_shard" else {""}
    losses = training.steps(0, STEPS)
    before = captured(training.network)
    is_on[:] = [True]
    memory = []
    for _ in range(5):
        with pytest.raises(ArithmeticError, match="on purpose"):
            training.step(99, failing)
        memory.append(allocated(slots))
    is_on.clear()
    assert memory[4] == memory[1]
    launches = captured(training.network)
    assert {*launches} == {*before} == names
    assert all(launches[name] > count > len(slots) for name, count in before.items() if name in ("", "layers.0"))
    losses += training.steps(STEPS, STEPS)
    torch.testing.assert_close((losses, values(training.source)), expected(form, slots), rtol=1e-9, atol=1e-9)
    afterwards = captured(training.network)
    assert all(count == launches[name] + STEPS * len(slots) for name, count in afterwards.items())
    assert not reasons(training.network, of_parts=True)


@pytest.mark.slots(1, 3)
def test_a_runtime_error_in_a_capture_lets_the_module_run_as_it_is(form: str, slots: list) -> None:
    IN_CAPTURE[slots[-1].index] = RuntimeError
    training = Training(form, slots, graphs=True)
    found = training.steps(0, 2 * STEPS), values(training.source)
    assert not IN_CAPTURE
    torch.testing.assert_close(found, expected(form, slots), rtol=1e-9, atol=1e-9)
    launches = captured(training.network)
    assert launches["layers.0"] >= STEPS * len(slots)
    assert launches.get("layers.1", 0) * len(slots) == launches["layers.0"] * (len(slots) - 1)
    (reason,) = reasons(training.network, of_parts=True)
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
    assert all(captured(training.network)[f"layers.{i}"] >= STEPS * len(slots) for i in range(3))
    assert not reasons(training.network, of_parts=True)


@pytest.mark.parametrize("before", [0, 2])
def test_one_replica_fails_between_its_graphs(before: int, form: str, slots: list) -> None:
    """The others launch theirs meanwhile."""
    is_on: list[bool] = []

    def fail(x: Tensor, number: int) -> Tensor:
        if is_on and number == before and x.device == slots[-1]:
            raise ArithmeticError("on purpose")
        return x

    BETWEEN.append(fail)
    check(form, slots, is_on)


def test_the_backward_of_one_replica_fails_between_its_graphs(form: str, slots: list) -> None:
    is_on: list[bool] = []

    def fail(grad: Tensor) -> None:
        if is_on:
            raise ArithmeticError("on purpose")

    def with_hook(x: Tensor, number: int) -> Tensor:
        if number != 1 or x.device != slots[-1]:
            return x
        x = x.clone()
        x.register_hook(fail)
        return x

    BETWEEN.append(with_hook)
    check(form, slots, is_on)


@pytest.mark.parametrize("by_parts", [False, True], ids=["whole", "parts"])
def test_a_hook_on_the_gradient_of_the_loss_fails(by_parts: bool, form: str, slots: list) -> None:
    def fail(grad: Tensor) -> None:
        raise ArithmeticError("on purpose")

    check(form, slots, [], lambda loss: loss.register_hook(fail), by_parts)


@pytest.mark.slots(1, 3)
def test_a_runtime_error_in_the_capture_of_the_whole_leaves_its_parts(form: str, slots: list) -> None:
    if form == "fully_shard":
        pytest.skip("it captures units only")
    IN_CAPTURE[slots[-1].index] = RuntimeError
    training = Training(form, slots, by_parts=False, graphs=True)
    found = training.steps(0, 2 * STEPS), values(training.source)
    assert not IN_CAPTURE
    torch.testing.assert_close(found, expected(form, slots), rtol=1e-9, atol=1e-9)
    launches = captured(training.network)
    assert launches.pop("", 0) >= STEPS * (len(slots) - 1)
    assert {*launches} == {f"layers.{i}" for i in range(3)}
    assert min(launches.values()) >= STEPS
    (reason,) = reasons(training.network)
    assert reason.startswith("on purpose (")
