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


def test_an_object_whose_method_runs_may_go() -> None:
    class Notes:
        def work(self, optimizer: torch.optim.Optimizer) -> bool:
            raise AssertionError("it is gone")

    before_steps(Notes().work)
    sgd().step()
