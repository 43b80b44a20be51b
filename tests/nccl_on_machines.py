"""NCCL between machines, for simulated devices: groups that have nothing else, and collectives that run on streams.

A group of the user takes tensors of devices only, and one of the library has gloo for host memory. Each device of a
group has a communicator and a stream. A collective is put on that stream behind the launching thread's current stream;
`wait` makes the current stream wait for it. As with NCCL, the host may block in a launch until all ranks have come to
it: here it always does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from dataparallel import _torch
from dataparallel.comm import nccl
from dataparallel.comm.streams.current import Event
from dataparallel.devices import CPU
from dataparallel.machines import group as groups

_new_group = distributed.new_group
_NAMES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


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
        self.with_gloo: set[Any] = set()  # the groups that were made with gloo for host memory
        self._real = {name: getattr(distributed, name) for name in _NAMES}

    def new_group(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        group = _new_group(*args, backend="gloo", **kwargs)
        if backend.startswith("cpu:gloo,"):
            self.with_gloo.add(group)
        return group

    def backends(self, group: Any) -> dict[str, str]:
        return {"sim": "nccl"} | ({"cpu": "gloo"} if group in self.with_gloo else {})

    def call(self, name: str, tensors: list[Tensor], *args: Any, group: Any, async_op: bool, **kwargs: Any) -> Any:
        device = tensors[0].device
        if device == CPU:
            assert group in self.with_gloo, "the group has NCCL only"
            return self._real[name](*tensors, *args, group=group, async_op=async_op, **kwargs)
        assert nccl.launching().locked(), "another thread may launch, too"
        ranks = tuple(distributed.get_process_group_ranks(group))
        current = torch.accelerator.current_stream(device)
        stream = self.communicators.setdefault((ranks, device), torch.Stream(device))
        self.issued.append((ranks, device, name))
        Event(current).make_wait(stream)
        with stream:
            host = [tensor.cpu() for tensor in tensors]
            self._real[name](*host, *args, group=group, **kwargs)
            tensors[0].copy_(host[0])
        return Work(stream)


@contextmanager
def nccl_on_machines() -> Iterator[NcclOnMachines]:
    """Inside, gloo's groups are as those of NCCL."""
    found = NcclOnMachines()
    timeout = _torch.group_timeout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_backends", found.backends)
        patch.setattr(distributed, "new_group", found.new_group)
        patch.setattr(_torch, "group_timeout", lambda group, device: timeout(group, CPU))
        for name in _NAMES:
            patch.setattr(distributed, name, _stand_in(found, name))
        yield found


def _stand_in(found: NcclOnMachines, name: str) -> Any:
    def function(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reads = args[:1] if name not in ("all_reduce", "broadcast") else ()
        return found.call(name, [tensor, *reads], *args[len(reads) :], **kwargs)

    return function


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
