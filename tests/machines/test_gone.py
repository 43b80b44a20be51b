"""A rank is gone: every other one raises within the timeout and says for what; later waits raise at once."""

from __future__ import annotations

import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest
import torch
from torch.futures import Future

from dataparallel.machines.errors import PeerGone
from dataparallel.machines.group import Result
from dataparallel.machines.lanes import Lane
from machine_ranks import all_machines, on_mortal_machines, said, summed, word

pytestmark = pytest.mark.devices("cpu")  # what is sent is in host memory: once is enough

GROUP_TIMEOUT = 3.0


def waits_again(rank: int, devices: list[torch.device]) -> list[str]:
    """What is raised by the first wait, by another one of the pass, by a later pass, and how long those take."""
    machines = all_machines()
    word(machines)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lane = Lane(machines, "steps")

    def end() -> Result:
        return lane.end("backward", [True])

    waits = [summed(lane, torch.ones(1)).wait, end().wait, lambda: end().wait()]
    found = []
    for wait in waits:
        found.append(said(wait))
        began = time.monotonic()
    assert time.monotonic() - began < 0.1
    return found


def test_later_waits_raise_the_same_sentence_at_once() -> None:
    ended = on_mortal_machines(waits_again, group_timeout=GROUP_TIMEOUT)
    assert ended[0].error is None
    assert len({*ended[0].result}) == 1
    assert ended[0].result[0].startswith("PeerGone: rank 0 has waited for ")


def never_done(rank: int, devices: list[torch.device]) -> None:
    called = SimpleNamespace(future=Future())
    launched = Lane(all_machines(), "steps").call("backward", "bucket 0", "bucket 0", lambda: called)
    with pytest.raises(PeerGone, match="nothing has come within the group's timeout of 1 s"):
        launched.wait()


def test_a_future_that_nobody_sets() -> None:
    for ended in on_mortal_machines(never_done, group_timeout=1):
        assert ended.error is None
        assert ended.seconds < 1 + 5


def stays_alone(rank: int, devices: list[torch.device]) -> str:
    """What this rank says if the other one does not connect."""
    return said(word, all_machines()) if rank == 0 else ""


def test_a_host_whose_name_leads_to_itself_is_told_the_remedy() -> None:
    """gloo offers others the address of the host's name, and an error of the timeout alone would not show it."""
    alone, _ = on_mortal_machines(stays_alone)
    assert alone.result.startswith("PeerGone: rank 0 has waited for what the ranks say of ")
    assert f"the address of this host's name, {socket.gethostname()!r}" in alone.result
    assert "set GLOO_SOCKET_IFNAME to the network interface" in alone.result
