"""Errors while replicas are captured: later steps are right."""

from __future__ import annotations

from collections.abc import Iterator
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


def trained(form: str, slots: list, **options: Any) -> tuple[Any, Any, int]:
    """Losses and values of a training, the network, and how many steps have failed. These are made again."""
    model, failures = Model(seeded(Net), numbers(4)), 0
    source, network = made(model, FORMS[form], slots, **options)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    losses: list[Tensor] = []
    while len(losses) < 2 * STEPS:
        optimizer.zero_grad()
        args, kwargs = moved(model.batch(4 * len(slots), len(losses)), slots[0])
        try:
            loss = mean_square_loss(network(*args, **kwargs))
        except ArithmeticError:
            failures += 1
            continue
        loss.backward()
        optimizer.step()
        losses.append(whole(loss))
    return (losses, values(source)), network, failures


@pytest.mark.slots(1, 3)
@pytest.mark.parametrize("error", [RuntimeError, ArithmeticError])
def test_after_a_runtime_error_in_a_capture_a_replica_runs_as_it_is_and_after_others_it_captures_again(
    error: type[Exception], form: str, slots: list
) -> None:
    """Other errors than those reach the caller."""
    expected, _, _ = trained(form, slots)
    IN_CAPTURE[slots[-1].index] = error
    found, network, failures = trained(form, slots, graphs=True)
    assert not IN_CAPTURE
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if error is ArithmeticError:
        assert failures == 1
        assert captured(network) >= STEPS * len(slots)
        assert not reasons(network)
        return
    assert failures == 0
    captures = [replica.captures for replica in graphed(network)]
    if len({*slots}) < len(slots):  # the first capture on their device has failed, in whichever slot
        captures.sort(reverse=True)
    assert captures == [1] * (len(slots) - 1) + [0]
    (reason,) = reasons(network)
    assert reason.startswith("on purpose (")
    assert "test_errors.py:" in reason
