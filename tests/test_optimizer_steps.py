"""Functions before the steps of all optimizers, which any thread may add and remove at any time."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from dataparallel.optimizer_steps import before_each_step


@pytest.fixture
def added() -> Iterator[ExitStack]:
    """Removes what a test has added."""
    with ExitStack() as stack:
        yield stack


def sgd() -> torch.optim.SGD:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.5)


def value_of(optimizer: torch.optim.Optimizer) -> float:
    return optimizer.param_groups[0]["params"][0][0].item()


def test_they_run_before_each_step_of_every_optimizer(added: ExitStack) -> None:
    seen = []
    added.callback(before_each_step(lambda optimizer: seen.append((optimizer, value_of(optimizer)))))
    first, second = sgd(), sgd()
    first.step()
    second.step()
    assert seen == [(first, 1.0), (second, 1.0)]


def test_they_end_when_they_are_removed() -> None:
    seen = []
    remove = before_each_step(seen.append)
    remove()
    remove()
    sgd().step()
    assert seen == []


def test_they_may_be_added_and_removed_while_another_thread_steps(added: ExitStack) -> None:
    """As if it were another thread: one that runs in a step adds others. torch's own hooks fail here."""
    seen = []

    def adds(optimizer: torch.optim.Optimizer) -> None:
        added.callback(before_each_step(seen.append))
        before_each_step(seen.append)()

    added.callback(before_each_step(adds))
    optimizer = sgd()
    optimizer.step()
    assert seen == []
    optimizer.step()
    assert seen == [optimizer]


def test_an_error_stops_the_step(added: ExitStack) -> None:
    def refuses(optimizer: torch.optim.Optimizer) -> None:
        raise RuntimeError("not now")

    added.callback(before_each_step(refuses))
    optimizer = sgd()
    with pytest.raises(RuntimeError, match="not now"):
        optimizer.step()
    assert value_of(optimizer) == 1.0
