"""How long each replica of one call takes, and how many samples the memory of its device holds.

The time of a slot is wall time in the thread that runs the replica, from when it has a permit until its device has
finished, without the time in which it waits for other replicas (`waiting`). Only measured calls wait for devices.
Memory is estimated: a forward is known by what it leaves on a device, and a backward not at all.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from dataparallel.batches.structures import tensors_in
from dataparallel.comm.streams.current import current_streams
from dataparallel.devices import CPU
from dataparallel.forks import in_forked_child

T = TypeVar("T")

USABLE = 0.75  # part of the free memory that a forward may fill: gradients and the gathered output need the rest


class _Waited(threading.local):
    """Seconds for which the replica of this thread has waited for others."""

    seconds = 0.0


_waited = _Waited()


@contextmanager
def waiting() -> Iterator[None]:
    """Around each wait of a replica for other replicas of its call."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _waited.seconds += time.perf_counter() - start


class SlotTimes:
    """The measurements of one call with replicas on ``slots``.

    Attributes:
        seconds: for each slot; those that have not ended are missing.
        span: seconds from the start until the last replica had ended.
        free: bytes that a tensor could have on each accelerator before the call, where that is known.
        taken: bytes of the inputs on each accelerator, and those by which the forward has filled it, where that is
            known: at its peak, if that was the highest ever, or else at its end.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self.slots = tuple(slots)
        self.seconds: dict[int, float] = {}
        self.span = 0.0
        self.free: dict[torch.device, int] = {}
        self.taken: dict[torch.device, int] = {}
        self._before: dict[torch.device, tuple[int, int]] = {}
        self._start = 0.0

    def begin(self, streams: Iterable[torch.Stream], inputs: Iterable[Any]) -> None:
        """Waits for what ``streams`` still do, which is no work of this call. ``inputs``: those of each replica."""
        for stream in streams:
            stream.synchronize()
        for device in {*self.slots} - {CPU}:
            free = free_bytes(device)
            if free is not None:
                self.free[device], self.taken[device] = free, 0
                allocated, peak = torch.accelerator.memory_allocated, torch.accelerator.max_memory_allocated
                self._before[device] = allocated(device), peak(device)
        for tensor in {id(tensor): tensor for each in inputs for tensor in tensors_in(each)}.values():
            if tensor.device in self.taken and tensor.layout == torch.strided and not tensor.is_nested:
                self.taken[tensor.device] += tensor.nbytes
        self._start = time.perf_counter()

    def run(self, slot: int, task: Callable[[], T]) -> T:
        """Runs a replica, in its thread and with its streams current, and waits for its device."""
        outside, _waited.seconds = _waited.seconds, 0.0  # of a replica around this one, if there is any
        start = time.perf_counter()
        try:
            value = task()
            for stream in current_streams([self.slots[slot]]).values():
                stream.synchronize()
            end = time.perf_counter()
            self.seconds[slot] = max(0.0, end - start - _waited.seconds)
            self.span = max(self.span, end - self._start)
            return value
        finally:
            _waited.seconds = outside

    def end(self) -> None:
        """Notes what the replicas have left in memory."""
        for device, (allocated, peak) in self._before.items():
            highest = torch.accelerator.max_memory_allocated(device)
            now = torch.accelerator.memory_allocated(device)
            self.taken[device] += (highest if highest > peak else now) - allocated


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A child that is forked inside a replica does not run that replica."""
    _waited.seconds = 0.0


def free_bytes(device: torch.device) -> int | None:
    """The bytes that a tensor could have: what the device has, and what torch's allocator has of it without using it.

    ``None`` if the backend does not tell.
    """
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except (RuntimeError, NotImplementedError):  # such a backend does not count, or has no limit
        return None


def samples_that_fit(
    slots: Sequence[torch.device],
    chunks: Sequence[int],
    free: Mapping[torch.device, int],
    taken: Mapping[torch.device, int],
) -> tuple[float, ...]:
    """For each slot the samples that its device has memory for; infinite where that is not known.

    Slots on one device share it. ``free`` were the bytes before a call in which the forward of ``chunks`` has ``taken``
    some.
    """
    most = [math.inf] * len(slots)
    for device, bytes_taken in taken.items():
        here = [slot for slot, other in enumerate(slots) if other == device]
        if bytes_taken > 0:
            room = USABLE * free[device] * sum(chunks[slot] for slot in here) / bytes_taken
            for slot in here:
                most[slot] = math.floor(room / len(here))
    return tuple(most)


def shares_by_memory(slots: Sequence[torch.device]) -> tuple[float, ...]:
    """Shares before anything is measured: equal, but less where less than half of the largest free memory is free."""
    free = {device: free_bytes(device) for device in {*slots} - {CPU}}
    known = [(free.get(slot) or 0) / slots.count(slot) for slot in slots]
    if None in free.values() or not any(known):
        return (1.0,) * len(slots)
    return tuple(min(1.0, max(2 * each / max(known), 1e-3)) for each in known)
