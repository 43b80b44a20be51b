"""Copies that still read shards in host memory, on their way to devices: before the host writes there, it waits.

The runtime of units notes the copies that it launches (`note`). `wait` is called where other code gets at the shards:
by each operator on sharded tensors that launches something, an optimizer's too, and by `ShardedTensor.shards`. So
neither a forward nor a backward has to wait for the copies that it has launched. Where nobody writes, as in evaluation,
copies that have ended are forgotten when there are many.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from dataparallel.comm.streams.current import Event
from dataparallel.forks import in_forked_child

MANY = 64
"""So many copies are noted before those are forgotten that have ended."""

_lock = threading.Lock()
_reading: list[Event] = []


def note(events: Iterable[Event]) -> None:
    """Copies that end at these events read shards in host memory."""
    with _lock:
        if len(_reading) >= MANY:
            _reading[:] = [event for event in _reading if not event.has_passed()]
        _reading.extend(events)


def wait() -> None:
    """Makes the host wait for the copies that were noted. Without any that is one question.

    A copy is forgotten when it has ended: until then other threads that call this wait for it too.
    """
    while _reading:
        with _lock:
            events = [*_reading]
        for event in events:
            event.synchronize()
        with _lock:
            _reading[:] = [event for event in _reading if event not in events]


@in_forked_child
def _forget() -> None:
    """In a forked child a thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _reading.clear()
