"""A process is killed or has fewer batches: all others raise in time and name who waits. A restart continues."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from dataparallel.composable import fully_shard
from dataparallel.gradients.comm_hooks import GradBucket
from dataparallel.machines.errors import PeerGone
from dataparallel.testing.steps import assert_equal
from machine_ranks import Ended, on_machines, on_mortal_machines
from sharded_machines import over
from sharded_steps import sharded, whole

FORMS = ["replicate", "hybrid", "1-D"]
GROUP_TIMEOUT = 6.0
STEPS, SAVED, WIDTH = 6, 2, 6
"""The state is saved after so many steps, again and again."""


class Happens:
    """What happens at places, in this process."""

    now: Callable[[str], None] = staticmethod(lambda place: None)


class Place(torch.autograd.Function):
    """The identity: its forward and its backward are places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        Happens.now(f"forward {name}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        Happens.now(f"backward {ctx.name}")
        return grad.clone(), None


class Layers(nn.Module):
    """Layers with places behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def units(self) -> list[nn.Module]:
        return [*self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = Place.apply(torch.tanh(layer(x)), str(number))
        found: Tensor = self.last(x)
        return found


def trained(
    form: str,
    rank: int,
    devices: list[torch.device],
    steps: int,
    folder: str | None = None,
    before: Callable[[], object] = lambda: None,
) -> Any:
    """A model after a number of steps. ``folder``: where the state is saved, and looked for at the start."""
    Happens.now("start")
    torch.manual_seed(rank)  # rank 0 sends its values
    model: Any = Layers().double().to(devices[0])
    if form == "with a hook":
        over("replicate", model, devices).register_comm_hook(None, all_reduced)
    elif form == "1-D":
        sharded(model, devices, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    else:
        over(form, model, devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    file = None if folder is None else Path(folder, "state")
    begin = 0
    if file is not None and file.exists():
        begin, state = torch.load(file)
        fully_shard.load_full_state_dict(model, state, optimizer)
    before()
    for step in range(begin, steps):
        Happens.now(f"before step {step}")
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x.to(devices[0])).square().sum(dim=1).mean().backward()
        optimizer.step()
        if file is not None and (step + 1) % SAVED == 0:
            state = fully_shard.full_state_dict(model, optimizer)
            if rank == 0:
                torch.save((step + 1, state), file.with_suffix(".new"))
                os.replace(file.with_suffix(".new"), file)
    return model


def all_reduced(state: None, bucket: GradBucket) -> Any:
    """A hook, in which others wait in the group of the user."""
    Happens.now("hook")
    future: Any = distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


PLACES = {
    "at the start": ("start", 1),
    "in forward": ("forward 1", 3),
    "in backward": ("backward 1", 3),
    "between steps": ("before step 3", 1),
    "in a hook": ("hook", 10),
}
"""For each place its name, and how often a slot comes there until the process is killed there."""


def train_mortally(
    rank: int, devices: list[torch.device], form: str, folder: str, victim: int, place: str
) -> tuple[float, str, str] | None:
    """Trains until the victim kills itself. The others return when they have raised, and what."""
    name, times = PLACES[place]
    left = times * len(devices) if times > 1 else 1

    def die(here: str) -> None:
        nonlocal left
        if rank == victim and here == name:
            left -= 1
            if left == 0:
                Path(folder, "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    Happens.now = die  # type: ignore[method-assign]
    try:
        trained(form, rank, devices, STEPS, folder)
    except Exception as error:
        return time.time(), type(error).__name__, str(error)
    return None


def train_with_a_server(rank: int, devices: list[torch.device], form: str, folder: str, port: int) -> Any:
    """As `train_mortally`, with a store that is in the process of rank 0, which is the victim."""
    distributed.destroy_process_group()
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    return train_mortally(rank, devices, form, folder, 0, "in backward")


def train_to_the_end(rank: int, devices: list[torch.device], form: str, folder: str | None) -> Any:
    return whole(trained(form, rank, devices, STEPS, folder).state_dict())


@functools.cache
def undisturbed(form: str, ranks: int) -> list[Any]:
    return on_machines(train_to_the_end, form, None, ranks=ranks, slots=2)


def assert_others_raised(ended: list[Ended], victim: int, folder: Path, can_ask: bool = True) -> None:
    """They say what they waited for and, if they can ask each other, who is gone."""
    killed_at = float((folder / "killed").read_text())
    assert ended[victim].code == -signal.SIGKILL
    for rank, end in enumerate(ended):
        if rank == victim:
            continue
        assert end.code == 0
        assert end.error is None
        assert end.result is not None, f"rank {rank} has not raised"
        raised_at, kind, text = end.result
        assert kind == "PeerGone", (kind, text)
        assert raised_at - killed_at < GROUP_TIMEOUT + 5
        assert re.search(f"rank {rank} has waited for .* of '", text), text
        assert not can_ask or re.search(rf"No word from ranks? ([\d, ]|and)*\b{victim}\b", text), text
        assert "Start all processes again, from a checkpoint" in text


CASES = [(place, ranks, 1) for place in PLACES for ranks in (2, 3) if place != "in a hook"]
CASES = [(form, *case) for form in FORMS for case in [*CASES, ("in backward", 3, 0)]]


@pytest.mark.parametrize(("form", "place", "ranks", "victim"), [*CASES, ("with a hook", "in a hook", 3, 1)])
def test_one_of_them_is_killed(form: str, place: str, ranks: int, victim: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ended = on_mortal_machines(
        train_mortally, form, folder, victim, place, ranks=ranks, slots=2, group_timeout=GROUP_TIMEOUT
    )
    assert_others_raised(ended, victim, tmp_path)
    assert (tmp_path / "state").exists() == (place != "at the start")
    again = on_machines(train_to_the_end, form, folder, ranks=ranks, slots=2)
    # gloo adds up in an order that depends on the buckets.
    assert_equal(again, undisturbed(form, ranks), "values", atol=1e-9 if place == "in a hook" else 0)


@pytest.mark.parametrize("form", FORMS)
def test_the_rank_with_the_store_is_killed(form: str, tmp_path: Path) -> None:
    """Nobody can tell the others what it waits for then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended = on_mortal_machines(train_with_a_server, form, str(tmp_path), port, ranks=3, slots=2)
    assert_others_raised(ended, 0, tmp_path, can_ask=False)


FEWER, MORE = 2, 4


def train_unevenly(rank: int, devices: list[torch.device], form: str, idle: float) -> tuple[float, str] | None:
    """Rank 1 ends after fewer steps, at once or after it has been idle. What the others raise, and after how long."""
    if rank == 1:
        trained(form, rank, devices, FEWER)
        time.sleep(idle)
        return None
    began = time.monotonic()

    def note() -> None:
        nonlocal began
        began = time.monotonic()

    with pytest.raises(PeerGone) as raised:
        trained(form, rank, devices, MORE, before=note)
    return time.monotonic() - began, str(raised.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("ranks", "idle"), [(2, 0), (3, 0), (3, GROUP_TIMEOUT + 8)])
def test_a_rank_has_fewer_batches(form: str, ranks: int, idle: float) -> None:
    ended = on_mortal_machines(train_unevenly, form, idle, ranks=ranks, slots=2, group_timeout=GROUP_TIMEOUT)
    assert ended[1].error is None
    for rank in {*range(ranks)} - {1}:
        assert ended[rank].error is None, ended[rank].error
        seconds, text = ended[rank].result
        assert seconds < GROUP_TIMEOUT + 5 + 3, text  # three seconds for the steps before
        assert re.search(f"rank {rank} has waited for .* of '", text), text
        assert "do not run the same number of steps" in text
        assert re.search(r"No word from ranks? 1\.", text), text
        for other in {*range(ranks)} - {1, rank}:
            assert re.search(f"rank {other} (for|has waited for) .* of '", text), text
