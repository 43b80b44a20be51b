"""NCCL between machines, for simulated devices: collectives that run on streams.

Each device of some ranks has a communicator and a stream. A collective is put on that stream behind the launching
thread's current stream; `wait` makes the current stream wait for it. As with NCCL, the host may block in a launch until
all ranks have come to it: here it always does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from dataparallel import _torch
from dataparallel.comm.streams.current import Event
from dataparallel.devices import CPU
from dataparallel.machines import lanes
from dataparallel.machines.group import GroupState


class Work:
    """What `torch.distributed.Work` is for NCCL."""

    def __init__(self, stream: torch.Stream) -> None:
        self._event, self._device = Event(stream), stream.device

    def wait(self) -> None:
        self._event.make_wait(torch.accelerator.current_stream(self._device))


class NcclOnMachines:
    """What this process has asked of NCCL.

    Attributes:
        communicators: ranks and device, in the order in which they were made.
        issued: ranks, device and name of each collective.
    """

    def __init__(self) -> None:
        self.communicators: dict[tuple[tuple[int, ...], torch.device], torch.Stream] = {}
        self.issued: list[tuple[tuple[int, ...], torch.device, str]] = []
        self._backends: dict[tuple[int, ...], Backend] = {}

    def of(self, state: GroupState, places: tuple[int, ...]) -> Backend:
        ranks = tuple(state.ranks[place] for place in places)
        if ranks not in self._backends:
            store = distributed.distributed_c10d.PrefixStore(f"as NCCL {ranks}", state.store)
            place = places.index(state.rank)
            gloo = distributed.ProcessGroupGloo(store, place, len(places), timedelta(seconds=60))
            self._backends[ranks] = Backend(self, ranks, gloo)
        return self._backends[ranks]


class Backend:
    """What `ProcessGroupNCCL` is: ``backend.allreduce([tensor])``."""

    def __init__(self, of: NcclOnMachines, ranks: tuple[int, ...], gloo: Any) -> None:
        self._of, self._ranks, self._gloo = of, ranks, gloo

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def _call(self, name: str, first: Any, *args: Any) -> Work:
        is_list, written = isinstance(first, list), first[0] if isinstance(first, list) else first
        device: torch.device = written.device
        assert device != CPU
        assert threading.current_thread().name == "machines: issuing", "another thread may launch, too"
        current = torch.accelerator.current_stream(device)
        stream = self._of.communicators.setdefault((self._ranks, device), torch.Stream(device))
        self._of.issued.append((self._ranks, device, name))
        Event(current).make_wait(stream)
        with stream:
            host = written.cpu()
            rest = [each.cpu() if isinstance(each, Tensor) else each for each in args]
            getattr(self._gloo, name)([host] if is_list else host, *rest).wait()
            written.copy_(host)
        return Work(stream)


@contextmanager
def nccl_on_machines() -> Iterator[NcclOnMachines]:
    """Inside, simulated devices have NCCL."""
    found = NcclOnMachines()
    timeout = _torch.group_timeout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "_backends", lambda group: {"sim": "nccl"})
        patch.setattr(GroupState, "communicators", lambda *of: found.of(*of))
        patch.setattr(_torch, "group_timeout", lambda group, device: timeout(group, CPU))
        yield found


def has_circle(orders: dict[int, list[tuple[str, int]]]) -> bool:
    """True if processes that take what they have issued one after the other would wait for each other for ever."""
    after: TopologicalSorter[tuple[str, int]] = TopologicalSorter()
    for issued in orders.values():
        for first, second in pairwise(issued):
            after.add(second, first)
    try:
        after.prepare()
    except CycleError:
        return True
    return False
