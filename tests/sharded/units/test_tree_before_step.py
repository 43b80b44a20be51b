"""What waits for an optimizer's step is done before the next one, once."""

import pytest
import torch

from dataparallel.sharded.units.tree import before_next_step


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
        before_next_step(works.work)
    assert works.calls == 0
    for _ in range(2):
        optimizer.step()
    assert works.calls == 1


def test_what_raises_is_done_again(optimizer):
    works = Works()
    works.error = ArithmeticError("not yet")
    before_next_step(works.work)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            optimizer.step()
    works.error = None
    for _ in range(2):
        optimizer.step()
    assert works.calls == 3


def test_an_object_that_is_gone_has_nothing_to_do(optimizer):
    before_next_step(Works().work)
    optimizer.step()


def test_an_optimizer_that_it_is_not_about_leaves_it_to_later_ones(optimizer):
    works = Works()
    works.is_done = False
    before_next_step(works.work)
    optimizer.step()
    works.is_done = True
    for _ in range(2):
        optimizer.step()
    assert works.calls == 2
