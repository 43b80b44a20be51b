"""Replicated over machines, a model does what it does on one device, whatever a training loop makes of it.

Loops are written once: `Here.loss` is that of a rank's own batch, or on one device the mean over all ranks. Other loops
are in test_machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from loops import waits
from over_machines import (
    adamw,
    assert_close,
    batch_of,
    build,
    gradients,
    loss_of,
    over_machines,
    weights,
)
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.testing.steps import assert_equal
from machine_ranks import on_machines, said

CPU = torch.device("cpu")


class Here:
    """Where a loop runs: in one rank, or on one device for all of them."""

    def __init__(self, model: nn.Module, device: torch.device, ranks: Sequence[int], average: bool = True) -> None:
        self.model, self.device, self.ranks, self.average = model, device, ranks, average

    def loss(self, number: int) -> Tensor:
        """Of the batches with this number, one of each rank."""
        losses = [loss_of(self.model(batch_of(rank, number).to(self.device))) for rank in self.ranks]
        total = torch.stack(losses).sum()
        return total / len(losses) if self.average else total

    def is_rank(self, rank: int) -> bool:
        return [*self.ranks] == [rank]


def train(here: Here) -> list[Any]:
    optimizer, seen = adamw(here.model), []
    for step in range(20):
        optimizer.zero_grad()
        here.loss(step).backward()
        seen.append(gradients(here.model))
        optimizer.step()
    return [seen, weights(here.model)]


def throw_away(here: Here) -> list[Any]:
    """Gradients that wait are sent with those of a later step, or dropped, and not sent."""
    with waits(here.model):
        here.loss(0).backward()
    here.loss(1).backward()
    found = [gradients(here.model)]
    for set_to_none in (True, False):
        with waits(here.model):
            here.loss(0).backward()
        here.model.zero_grad(set_to_none=set_to_none)
        here.loss(0).backward()
        found.append([grad for grad in gradients(here.model) if grad is not None and grad.any()])
        here.model.zero_grad()
    return found


def evaluate_alone(here: Here) -> list[Any]:
    """One rank may evaluate alone."""
    optimizer = adamw(here.model)
    for step in range(4):
        optimizer.zero_grad()
        here.loss(step).backward()
        optimizer.step()
        if here.is_rank(step % 2):
            with torch.no_grad():
                for number in range(3):
                    here.loss(number)
    return weights(here.model)


def freeze(here: Here) -> list[Any]:
    """``requires_grad`` may change between steps. In one of them a rank sees a tree that the others never see."""
    seen = []
    for step in range(9):
        here.model.second.requires_grad_(step not in (3, 4, 5))
        if step == 5 and here.is_rank(1):
            here.model.first.weight.requires_grad_(False)
            with torch.no_grad():
                here.loss(0)
            here.model.first.weight.requires_grad_(True)
        here.model.zero_grad()
        here.loss(step).backward()
        seen.append(gradients(here.model))
    return seen


def three_steps(here: Here) -> list[Any]:
    for step in range(3):
        here.model.zero_grad()
        here.loss(step).backward()
    return gradients(here.model)


class Tied(nn.Module):
    """One weight in two places, one module in two places, a complex parameter, one in another order of memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.second.weight = self.first.weight
        self.again = self.second
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.conv = nn.Conv2d(1, 2, 2).double().to(memory_format=torch.channels_last)
        self.single = nn.Parameter(torch.randn(3))
        for name in ("first", "second", "conv"):
            getattr(self, name).to(device)
        self.second.weight = self.first.weight
        self.turn, self.single = nn.Parameter(self.turn.to(device)), nn.Parameter(self.single.to(device))

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(torch.tanh(self.second(torch.tanh(self.first(x)))))
        y = (y * self.turn).abs()
        return self.conv(y.view(-1, 1, 2, 2)).flatten(1) * self.single.double().sum()


class Checkpointed(nn.Module):
    """Its layers are recomputed by a backward inside the backward."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.net = build(device)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x.requires_grad_(), use_reentrant=True)


LOOPS: dict[str, tuple[Callable[[Here], Any], Callable[..., Any]]] = {
    "train": (train, build),
    "throw away": (throw_away, build),
    "evaluate alone": (evaluate_alone, build),
    "freeze": (freeze, build),
    "tied weights and several dtypes": (three_steps, Tied),
}


def run(rank: int, devices: list[torch.device], name: str, average: bool) -> Any:
    loop, make = LOOPS[name]
    torch.manual_seed(rank)
    return loop(Here(over_machines(make(devices[0]), devices, average=average), devices[0], [rank]))


@pytest.mark.parametrize(("name", "average"), [(name, name != "train") for name in LOOPS])
def test_loops_are_those_of_one_device(name: str, average: bool) -> None:
    loop, make = LOOPS[name]
    torch.manual_seed(0)
    expected = loop(Here(make(CPU), CPU, range(2), average))
    for found in on_machines(run, name, average):
        assert_equal(found, expected, name, atol=1e-5 if make is Tied else 1e-9)  # it has a float32 parameter


def ask_for_gradients(rank: int, devices: list[torch.device]) -> list[Any]:
    model = over_machines(build(devices[0], seed=rank), devices)
    x = batch_of(rank, 0).to(devices[0]).requires_grad_()
    used = [*model.first.parameters(), *model.branch.parameters()]
    found = torch.autograd.grad(loss_of(model(x)), used)
    # A backward that does not lead to parameters is no business of other machines.
    (of_input,) = torch.autograd.grad(loss_of(model(x)), [x]) if rank == 0 else (None,)
    loss_of(model(x)).backward(inputs=used)
    return [[grad.cpu() for grad in found], gradients(model), None if of_input is None else of_input.cpu()]


def test_gradients_that_are_asked_for() -> None:
    model = build(torch.device("cpu"))
    used = [*model.first.parameters(), *model.branch.parameters()]
    x = batch_of(0, 0).requires_grad_()
    losses = [loss_of(model(x)), loss_of(model(batch_of(1, 0)))]
    *expected, of_input = torch.autograd.grad(sum(losses) / 2, [*used, x])
    for rank, (found, grads, of_x) in enumerate(on_machines(ask_for_gradients)):
        assert_close(found, expected)
        assert_close([grad for grad in grads if grad is not None], expected)
        if rank == 0:
            assert_close([of_x], [2 * of_input])


class Norm(nn.Module):
    """Layers with running statistics."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.double().to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def train_norm(rank: int, devices: list[torch.device], is_torchs: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model: Any = Norm(torch.device("cpu") if is_torchs else devices[0])
    model = nn.parallel.DistributedDataParallel(model) if is_torchs else over_machines(model, devices)
    optimizer = adamw(model)
    for step in range(6):
        optimizer.zero_grad()
        if step == 4:  # a forward that waits while another one updates and sends the statistics
            loss_of(model(batch_of(rank, 9).to(devices[0])))
        loss_of(model(batch_of(rank, step).to(devices[0]))).backward()
        optimizer.step()
    own = weights(model.module if is_torchs else model)
    model.eval()
    with torch.no_grad():
        return own, [model(batch_of(0, 0).to(devices[0])).cpu()]


def test_statistics_are_those_of_rank_0_as_under_torchs_wrapper() -> None:
    """With one slot for each machine, each normalises its whole batch."""
    (expected, _), _ = on_machines(train_norm, True, slots=1, kind="cpu")
    (first, _), (second, _) = on_machines(train_norm, False, slots=1)
    assert_close(first, expected)
    parameters = len([*Norm(torch.device("cpu")).parameters()])
    assert_close(second[:parameters], first[:parameters])


def ignore(rank: int, devices: list[torch.device]) -> dict[str, Any]:
    """What is ignored belongs to each rank alone. On slots of one device, all of them may share it."""
    model = build(devices[0], seed=rank)
    before = [each.detach().cpu().clone() for each in (*model.branch.parameters(), model.last.bias)]
    over_machines(model, devices[:1], ignored_modules=[model.branch], ignored_params=[model.last.bias])
    x = batch_of(0, 0).to(devices[0]) * (rank + 1)
    loss_of(model(x)).backward()
    after = [each.detach().cpu() for each in (*model.branch.parameters(), model.last.bias)]
    assert_close(after, before)
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_ignored_parameters_are_not_sent() -> None:
    first, second = on_machines(ignore)
    for name, grad in first.items():
        is_ignored = name.startswith("branch") or name == "last.bias"
        assert torch.equal(grad, second[name]) is not is_ignored, name


def refused(rank: int, devices: list[torch.device]) -> dict[str, str]:
    """What is said of modules that work on one device. Each has a group of its own, which the refusal ends."""
    x, found = batch_of(rank, 0).to(devices[0]), {}

    def in_a_group(module: nn.Module, slots: list[torch.device] = devices) -> Any:
        return over_machines(module, slots, process_group=distributed.new_group())

    model = in_a_group(build(devices[0]))
    loss_of(model(x)).backward()
    before = gradients(model)
    found["recorded"] = said(lambda: loss_of(model(x)).backward(create_graph=True))
    assert_close(gradients(model), before)
    reentrant = in_a_group(Checkpointed(devices[0]))
    found["reentrant"] = said(lambda: loss_of(reentrant(x)).backward())
    sparse = in_a_group(nn.Sequential(nn.Embedding(4, 3, sparse=True)).double().to(devices[0]))
    found["sparse"] = said(lambda: sparse(torch.arange(4, device=devices[0])).sum().backward())
    norm = nn.SyncBatchNorm.convert_sync_batchnorm(Norm(devices[0]))
    found["norm"] = said(lambda: in_a_group(norm))
    in_a_group(norm, devices[:1]).eval()
    loss_of(norm(x)).backward()
    return found


def test_what_is_refused() -> None:
    """A backward that is recorded, reentrant checkpoints, sparse gradients, and torch's norms on several slots."""
    both = on_machines(refused)
    assert all("create_graph=True" in found["recorded"] for found in both)
    assert all("SyncBatchNorm and 2 slots" in found["norm"] for found in both)
    assert any("use_reentrant=False" in found["reentrant"] for found in both)
    assert any("'0.weight'" in found["sparse"] and "sparse=False" in found["sparse"] for found in both)
