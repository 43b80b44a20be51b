"""Across machines: if a replica fails, all machines raise, and the next step is undisturbed. Nobody waits forever."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import peers
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed
from machine_ranks import on_machines, on_mortal_machines
from peer_machines import samples, spanning


class Fails(RuntimeError):
    """What the tests' model raises."""


class FailsBackward(torch.autograd.Function):
    """The identity; its backward fails in one replica, and lasts a while in the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails, ctx.is_here = fails, peers.index() == 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails and ctx.is_here:
            raise Fails("in backward")
        if ctx.fails:
            time.sleep(0.1)  # a thread of the engine may still be there when `backward()` has raised
        return grad, None


class Awkward(nn.Module):
    """Two collectives. The second replica fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x: Tensor, fails: str = "", collectives: bool = True) -> Tensor:
        for position, layer in enumerate(self.layers):
            if fails == f"forward {position}" and peers.index() == 1:
                raise Fails("in forward")
            x = torch.tanh(layer(FailsBackward.apply(x, fails == f"backward {position}")))
            if position < 2 and collectives:
                x = x + peers.all_reduce(x.sum(0), "mean", across_machines=True)
        return x


PLACES = [f"{way} {position}" for way in ("forward", "backward") for position in range(3)]


def weights(model: nn.Module) -> list[Tensor]:
    found: list[Any] = [*model.parameters()]
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).detach().cpu() for each in found]


def train(rank: int, devices: list[torch.device], form: str, culprits: list[int]) -> tuple[list[str], list[Tensor]]:
    """Every second step fails on the culprits, and is left out if there are none. What was raised, and the weights."""
    model = spanning(Awkward(), devices, form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raised = []
    for step in range(2 * len(PLACES) + 1):
        place = PLACES[step // 2] if step % 2 else ""
        if place and not culprits:
            continue
        optimizer.zero_grad()
        batch = samples(4, seed=10 * step + rank).to(devices[0]).requires_grad_()
        try:
            model(batch, place if rank in culprits else "").square().sum().backward()
        except (Fails, PeerFailed) as error:
            raised.append(f"{type(error).__name__}: {error}")
            # In front of all layers, the sums may have been handed out when the error comes.
            assert place == "backward 0" or all(parameter.grad is None for parameter in model.parameters())
            continue
        assert not place
        optimizer.step()
    return raised, weights(model)


@pytest.mark.parametrize("form", ["replicate", "fully_shard"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("culprits", [[1], [0, 1]], ids=["one", "two"])
def test_all_machines_raise_and_go_on(form, ranks, culprits):
    found = on_machines(train, form, culprits, ranks=ranks)
    for rank, (raised, own) in enumerate(found):
        assert len(raised) == len(PLACES)
        for message in raised:
            assert message.startswith("Fails" if rank in culprits else "PeerFailed"), message
        for ours, theirs in zip(own, found[0][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    _, undisturbed = on_machines(train, form, [], ranks=ranks)[0]
    for ours, theirs in zip(found[0][1], undisturbed, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def evaluate(rank: int, devices: list[torch.device]) -> list[str]:
    """Forwards without gradients, of which some fail on rank 1."""
    model = spanning(Awkward(), devices).eval()
    raised = []
    with torch.no_grad():
        for step, place in enumerate(["", "forward 1", "", "forward 0", "", "forward 2", ""]):
            try:
                model(samples(4, seed=step).to(devices[0]), place if rank == 1 else "")
            except (Fails, PeerFailed) as error:
                raised.append(f"{step} {type(error).__name__}")
    return raised


def test_forwards_without_gradients_fail_together_too():
    assert on_machines(evaluate) == [
        [f"{step} PeerFailed" for step in (1, 3, 5)],
        [f"{step} Fails" for step in (1, 3, 5)],
    ]


class Differs(nn.Module):
    """A rank calls something else in one step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor, what: str = "") -> Tensor:
        y = x * self.weight
        if what == "another" and self.rank == 1:
            return y * peers.all_gather(y, across_machines=True).sum()
        if what == "shape" and self.rank == 1:
            return y * peers.all_reduce(y.sum(), across_machines=True)
        if what == "grad mode":
            with torch.set_grad_enabled(self.rank == 0):
                return y * peers.all_reduce(y.sum(0), across_machines=True)
        if what == "one less" and self.rank == 1:
            return y
        y = y * peers.all_reduce(y.sum(0), across_machines=True)
        if what == "one more" and self.rank == 1:
            peers.barrier(across_machines=True)
        return y


def differ(rank: int, devices: list[torch.device]) -> dict[str, str]:
    model = spanning(Differs(rank), devices)
    raised = {}
    for what in ["", "another", "", "shape", "grad mode", "", "one more", "one less", ""]:
        try:
            model(samples(4).to(devices[0]), what).sum().backward()
        except MachinesDiffer as error:
            raised[what] = str(error)
    return raised


def test_machines_that_come_to_different_collectives_raise():
    first, second = on_machines(differ)
    assert [*first] == [*second] == ["another", "shape", "grad mode", "one more", "one less"]
    assert "all_gather" in first["another"]
    assert "all_reduce" in first["another"]
    assert "the end of a forward" in first["one more"]


def lose_a_rank(rank: int, devices: list[torch.device], place: str) -> str:
    model = spanning(Awkward(), devices)
    batch = samples(4).to(devices[0])
    model(batch).sum().backward()
    loss = model(batch).sum() if place == "backward" else None
    torch.distributed.barrier()  # gloo passes on through rank 1 what the others wait for in the forward
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        (model(batch).sum() if loss is None else loss).backward()
    except MachinesError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_machine_that_is_gone_ends_the_wait(place):
    found = on_mortal_machines(lose_a_rank, place, slots=2, ranks=3)
    assert [each.code for each in found] == [0, -signal.SIGKILL, 0]
    assert [found[0].result, found[2].result] == ["PeerGone", "PeerGone"]
    assert max(found[0].seconds, found[2].seconds) < 20
