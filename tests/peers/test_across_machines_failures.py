"""Across machines: if a replica fails, all machines raise, and so does every later step. Nobody waits forever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import peers
from dataparallel.machines.errors import MachinesError
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


def groups(count: int) -> list[Any]:
    """New groups of all ranks: a failure ends its group."""
    return [torch.distributed.new_group() for _ in range(count)]


def raised(call: Callable[[], object]) -> str:
    began = time.monotonic()
    try:
        call()
    except (Fails, MachinesError) as error:
        assert time.monotonic() - began < SOON
        return f"{type(error).__name__}: {error}"
    return "nothing"


SOON = 10.0
"""Seconds; the timeout of the group is 90."""


def train(
    rank: int, devices: list[torch.device], form: str, culprits: list[int], has_begun: bool
) -> list[tuple[str, str]]:
    """A step for each place fails on the culprits. What was raised by it, and by the next one."""
    found = []
    for place, group in zip(PLACES, groups(len(PLACES)), strict=True):
        model = spanning(Awkward(), devices, form, process_group=group)

        def step(fails: str = "", model: Any = model) -> None:
            batch = samples(4, seed=rank).to(devices[0]).requires_grad_()
            model(batch, fails).square().sum().backward()

        if has_begun:
            step()
            model.zero_grad()
        first = raised(lambda place=place: step(place if rank in culprits else ""))
        # In front of all layers, the sums may have been handed out when the error comes.
        assert place == "backward 0" or all(parameter.grad is None for parameter in model.parameters())
        found.append((first, raised(step)))
    return found


@pytest.mark.parametrize("form", ["replicate", "fully_shard"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("culprits", [[1], [0, 1]], ids=["one", "two"])
def test_all_machines_raise_and_so_do_later_steps(form, ranks, culprits):
    found = on_machines(train, form, culprits, True, ranks=ranks)
    for of_ranks in zip(*found, strict=True):
        assert len({later for _, later in of_ranks}) == 1
        for rank, (message, later) in enumerate(of_ranks):
            assert message.startswith("Fails" if rank in culprits else "PeerFailed"), message
            assert rank in culprits or message == later
            assert later.startswith("PeerFailed: rank ")


def test_the_first_step_may_fail_where_others_wait_for_the_backward():
    for of_ranks in zip(*on_machines(train, "replicate", [1], False), strict=True):
        assert [message.partition(":")[0] for message, _ in of_ranks] == ["PeerFailed", "Fails"]


def evaluate(rank: int, devices: list[torch.device]) -> list[str]:
    """Forwards without gradients, of which the second one fails on rank 1."""
    found = []
    for place, group in zip(PLACES[:3], groups(3), strict=True):
        model, batch = spanning(Awkward(), devices, process_group=group).eval(), samples(4).to(devices[0])
        with torch.no_grad():
            model(batch)
            for fails in (place, ""):
                found.append(raised(lambda: model(batch, fails if rank == 1 else "")).partition(":")[0])  # noqa: B023
    return found


def test_forwards_without_gradients_fail_together_too():
    assert on_machines(evaluate) == [["PeerFailed"] * 6, ["Fails", "PeerFailed"] * 3]


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
    found = {}
    kinds = ["another", "shape", "grad mode", "one more", "one less"]
    for what, group in zip(kinds, groups(len(kinds)), strict=True):
        model = spanning(Differs(rank), devices, process_group=group)

        def step(what: str = "", model: Any = model) -> None:
            model(samples(4).to(devices[0]), what).sum().backward()

        step()
        found[what] = raised(lambda what=what: step(what))
        assert raised(step) == found[what]
    return found


def test_machines_that_come_to_different_collectives_raise():
    first, second = on_machines(differ)
    assert first == second
    assert {text.partition(":")[0] for text in first.values()} == {"MachinesDiffer"}
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
