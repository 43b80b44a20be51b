"""A process is killed or has fewer batches: all others raise in time and name who waits. A restart continues."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from dataparallel.machines.errors import PeerGone
from machine_ranks import Ended, on_machines, on_mortal_machines
from machine_steps import FORMS, assert_equal_values, happens, train, trained

GROUP_TIMEOUT = 6.0
STEPS = 6

PLACES = {
    "at the start": ("start", 1),
    "in forward": ("forward 1", 3),
    "in backward": ("backward 1", 3),
    "between steps": ("before step 3", 1),
}
"""For each place its name in `machine_steps`, and how often a slot comes there until the process is killed there."""


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

    happens.now = die
    try:
        train(form, rank, devices, STEPS, folder)
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


def train_to_the_end(rank: int, devices: list[torch.device], form: str, folder: str | None) -> dict[str, Tensor]:
    return train(form, rank, devices, STEPS, folder)


@functools.cache
def undisturbed(form: str, ranks: int) -> list[Any]:
    return on_machines(train_to_the_end, form, None, ranks=ranks, slots=2)


def assert_others_raised(ended: list[Ended], victim: int, killed_at: float) -> None:
    """They name who is gone, as the ranks do that heard it first, and what they waited for."""
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
        assert re.search(rf"No word from ranks? ([\d, ]|and)*\b{victim}\b", text), text
        assert "Start all processes again, from a checkpoint" in text


CASES = [*((place, ranks, 1) for place in PLACES for ranks in (2, 3)), ("in backward", 3, 0)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("place", "ranks", "victim"), CASES)
def test_one_of_them_is_killed(form: str, place: str, ranks: int, victim: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ended = on_mortal_machines(
        train_mortally, form, folder, victim, place, ranks=ranks, slots=2, group_timeout=GROUP_TIMEOUT
    )
    assert_others_raised(ended, victim, float((tmp_path / "killed").read_text()))
    assert (tmp_path / "state").exists() == (place != "at the start")
    again = on_machines(train_to_the_end, form, folder, ranks=ranks, slots=2)
    for rank, (found, expected) in enumerate(zip(again, undisturbed(form, ranks), strict=True)):
        # The buffers of rank 0 were saved.
        assert_equal_values(found, expected, buffers=rank == 0)


@pytest.mark.parametrize("form", FORMS)
def test_the_rank_with_the_store_is_killed(form: str, tmp_path: Path) -> None:
    """Nobody can tell the others what it waits for then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended = on_mortal_machines(train_with_a_server, form, str(tmp_path), port, ranks=3, slots=2)
    killed_at = float((tmp_path / "killed").read_text())
    assert ended[0].code == -signal.SIGKILL
    for rank in (1, 2):
        raised_at, kind, text = ended[rank].result
        assert kind == "PeerGone", (kind, text)
        assert raised_at - killed_at < GROUP_TIMEOUT + 5
        assert re.search(f"rank {rank} has waited for .* of '", text), text


FEWER, MORE = 2, 4


def train_unevenly(rank: int, devices: list[torch.device], form: str, idle: float) -> tuple[float, str] | None:
    """Rank 1 ends after fewer steps, at once or after it has been idle. What the others raise, and after how long."""
    if rank == 1:
        trained(form, rank, devices, FEWER)
        time.sleep(idle)
        return None
    began = time.monotonic()

    def note(model: object) -> None:
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
