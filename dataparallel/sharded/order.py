"""In which order operators on shards run: after forward's streams in a backward, and after copies that still read.

Operators run on the current streams of the owners. In a backward a thread of autograd runs them, with current streams
of its own: only on the thread's device torch sets the stream that forward has used. So the streams of operators with a
graph are remembered for each device. In a backward operators run on the last stream, to which the memory of their
results then belongs. This stream waits for the other streams before an operator, and they wait for it afterwards. If
all are default streams, there is nothing to do.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch

from dataparallel import _torch
from dataparallel.comm.streams.current import Event, current_streams, streams_joined
from dataparallel.devices import current_device
from dataparallel.forks import in_forked_child

_used_streams: dict[torch.device, dict[torch.Stream, None]] = {}
"""For each device the streams of operators with a graph. torch has few streams for a device, so there are few here."""

_last_stream: dict[torch.device, torch.Stream] = {}
"""For each device the stream in `_used_streams` that was used last."""


def remember_streams(devices: Collection[torch.device]) -> None:
    for device, stream in _streams(devices).items():
        _used_streams.setdefault(device, {})[stream] = None
        _last_stream[device] = stream


@contextmanager
def ordered_in_backward(devices: Collection[torch.device]) -> Iterator[None]:
    """Orders the launches of the block after the launches of forward on these devices, and before later launches there.

    Outside of a backward the block runs on the current streams.
    """
    if not _torch.is_in_backward():
        yield
        return
    # On the thread's own device torch has set the stream.
    to_be_set = {
        device: _last_stream[device]
        for device, here in _streams(devices).items()
        if _last_stream.get(device, here) != here and device != current_device(device)
    }
    with streams_joined(to_be_set):
        pairs = [
            (here, other)
            for device, here in _streams(devices).items()
            for other in [*_used_streams.get(device, ())]
            if other != here
        ]
        for here, other in pairs:
            Event(other).make_wait(here)
        try:
            yield
        finally:
            for here, other in pairs:
                Event(here).make_wait(other)


def _streams(devices: Collection[torch.device]) -> dict[torch.device, torch.Stream]:
    return current_streams(device for device in devices if device.type != "meta")


# ---- copies that still read shards in host memory --------------------------------------------------------------------

# Units launch copies from shards in host memory, and note events at their ends. The host waits for the events before it
# may write: before each operator that launches, and in `ShardedTensor.shards`. So no forward or backward has to wait.

MANY_HOST_READS = 64
"""At this many noted copies the ended ones are forgotten, so that they stay few if nobody writes, as in evaluation."""

_host_reads: list[Event] = []
_lock = threading.Lock()


def note_host_reads(events: Iterable[Event]) -> None:
    """Notes events at the end of copies that read shards in host memory."""
    with _lock:
        if len(_host_reads) >= MANY_HOST_READS:
            _host_reads[:] = [event for event in _host_reads if not event.has_passed()]
        _host_reads.extend(events)


def wait_for_host_reads() -> None:
    """Makes the host wait for all noted copies. Without any this costs one check.

    A copy is forgotten when it has ended. Until then other threads that call this wait for the copy too.
    """
    while _host_reads:
        with _lock:
            events = [*_host_reads]
        for event in events:
            event.synchronize()
        with _lock:
            _host_reads[:] = [event for event in _host_reads if event not in events]


@in_forked_child
def _forget_host_reads() -> None:
    """In a forked child a thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _host_reads.clear()
