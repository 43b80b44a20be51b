"""Functions before the steps of all optimizers, which any thread may add at any time."""

import pytest
import torch

from dataparallel.optimizer_steps import before_steps


def sgd() -> torch.optim.SGD:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.5)


def value_of(optimizer: torch.optim.Optimizer) -> float:
    return optimizer.param_groups[0]["params"][0][0].item()


def test_they_run_before_each_step_of_every_optimizer_until_they_return_true() -> None:
    seen = []

    def notes(optimizer: torch.optim.Optimizer) -> bool:
        seen.append((optimizer, value_of(optimizer)))
        return len(seen) == 2

    before_steps(notes)
    first, second = sgd(), sgd()
    first.step()
    second.step()
    first.step()
    assert seen == [(first, 1.0), (second, 1.0)]


def test_they_may_be_added_while_another_thread_steps() -> None:
    """As if it were another thread: one that runs in a step adds another. torch's own hooks fail here."""
    seen = []

    def notes(optimizer: torch.optim.Optimizer) -> bool:
        seen.append(optimizer)
        return True

    def adds(optimizer: torch.optim.Optimizer) -> bool:
        before_steps(notes)
        return True

    before_steps(adds)
    optimizer = sgd()
    optimizer.step()
    assert seen == []
    optimizer.step()
    assert seen == [optimizer]


def test_an_error_stops_the_step() -> None:
    refusals = ["not now"]

    def refuses(optimizer: torch.optim.Optimizer) -> bool:
        if refusals:
            raise RuntimeError(refusals.pop())
        return True

    before_steps(refuses)
    optimizer = sgd()
    with pytest.raises(RuntimeError, match="not now"):
        optimizer.step()
    assert value_of(optimizer) == 1.0
    optimizer.step()
    assert value_of(optimizer) == 0.5


class Works:
    """Counts its calls, and raises or has not done yet if it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.is_done = True

    def work(self, optimizer: torch.optim.Optimizer) -> bool:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self.is_done


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)


def test_it_is_done_before_the_next_step_and_not_before_later_ones(optimizer):
    works = Works()
    for _ in range(2):
        before_steps(works.work)
    assert works.calls == 0
    for _ in range(2):
        optimizer.step()
    assert works.calls == 1


def test_what_raises_is_done_again(optimizer):
    works = Works()
    works.error = ArithmeticError("not yet")
    before_steps(works.work)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            optimizer.step()
    works.error = None
    for _ in range(2):
        optimizer.step()
    assert works.calls == 3


def test_an_object_that_is_gone_has_nothing_to_do(optimizer):
    before_steps(Works().work)
    optimizer.step()


def test_an_optimizer_that_it_is_not_about_leaves_it_to_later_ones(optimizer):
    works = Works()
    works.is_done = False
    before_steps(works.work)
    optimizer.step()
    works.is_done = True
    for _ in range(2):
        optimizer.step()
    assert works.calls == 2
