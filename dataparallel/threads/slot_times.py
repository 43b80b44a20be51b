"""How long each replica of one call takes, and what its forward leaves in memory.

``threads.balance`` makes a `SlotTimes` for each measured call, and reads it. ``parallel_apply`` runs the replicas with
it. Only measured calls wait for devices.

The time of a slot is wall time in the thread that runs the replica, from when it has a permit until its device has
finished. So time in ``sleep`` and other waiting counts. Time in which it waits for other replicas (`waiting`) does not,
because it is theirs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from dataparallel.devices import CPU
from dataparallel.forks import in_forked_child
from dataparallel.streams.current import current_streams
from dataparallel.structures import tensors_in
from dataparallel.threads.free_memory import free_bytes

__all__ = ["SlotTimes", "waiting"]

T = TypeVar("T")


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
