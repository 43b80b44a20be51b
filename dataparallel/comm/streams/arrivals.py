"""`Arrivals`: sends buckets of parameters on side streams, while replicas already compute with the first of them.

A forward needs the first layer's parameters first. So buckets are sent in the order of use, and a lookup of a parameter
(``replicas.build``) makes the current stream wait for one bucket only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.buckets import flatten
from dataparallel.comm.streams.current import (
    Event,
    PieceStreams,
    current_streams,
    kept_stream,
    piece_streams,
    run_apart,
    streams_set,
)
from dataparallel.comm.transport import FlatBroadcast
from dataparallel.environment import says_no

VARIABLE = "DATAPARALLEL_LATE_COPIES"

_FLATS_HELD = 2
"""The number of flat buffers at a time: one is sent while the next one is filled."""

_PIECE_STREAMS = 3
"""The streams that pieces take in turn on each device (``comm.streams.current``); pieces of buckets differ in size."""


class Arrival:
    """The arrival of a bucket on one device: events on the ``streams`` that received it, or read it on the root.

    ``waited``: the streams that have waited for the bucket.
    """

    __slots__ = ("_events", "waited")

    def __init__(self, *streams: torch.Stream) -> None:
        self._events = [Event(stream) for stream in streams]
        self.waited: set[torch.Stream] = set()

    def make_wait(self, stream: torch.Stream) -> None:
        """Makes ``stream`` wait for the bucket."""
        for event in self._events:
            event.make_wait(stream)
        self.waited.add(stream)  # after the wait: another thread may then use the stream without a wait


class ExpectedArrivals:
    """The arrivals that a replica waits for, on the device ``device_index``, by a tensor's position in the plan."""

    __slots__ = ("by_position", "device_index")

    def __init__(self) -> None:
        self.device_index = 0
        self.by_position: Sequence[Arrival | None] = ()


class Arrivals:
    """The late copies of one set of replicas on ``slots``, which are accelerators. The first slot is the root.

    - The side streams wait for the computing streams before they read a source or write a copy. The memory of copies
      belongs to the computing streams, and earlier work there may still use it.
    - The root fills flat buffers on a filling stream, so that it fills one while it sends another. A buffer belongs to
      that stream, so it is freed only when the stream waits for its send: before the next buffer but one is filled.
    - Buckets follow each other on the streams of ``comm.streams.current``, without waiting for each other.
    - An event follows each bucket on each stream that received it. On the root, where replicas share the source's
      memory, an event follows the read of the source, because a forward may write to the source.
    - When the call ends, also if it fails, the computing streams wait for the side streams, so that later work there
      comes after the copies. Until then this object holds the copies, and the memory of the sources too, because
      somebody may give a source other memory. Until then only slot 0's lookups order writes to the source.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self._slots = list(slots)
        self._computing = current_streams(slots)
        self._read: dict[int, Arrival] = {}
        self._arrived: dict[torch.device, dict[int, Arrival]] = {device: {} for device in self._computing}
        self._held: list[object] = []  # memory that side streams may still use

    @torch.no_grad()
    def launch(self, broadcasts: Iterable[FlatBroadcast], at_once: Set[int]) -> None:
        """Sends buckets from the root, in this order, and returns when all are launched.

        ``at_once``: positions of tensors that are read without a lookup. Their buckets are sent first, and the
        computing streams wait for those buckets.
        """
        root = self._slots[0]
        sides = {device: kept_stream(device, "parameters") for device in self._computing}
        filling = kept_stream(root, "flat buffers")
        for device, side in [*sides.items(), (root, filling)]:
            Event(self._computing[device]).make_wait(side)
        sent: deque[tuple[Tensor, Event]] = deque()  # flat buffers, each with an event after its send
        try:
            with streams_set(sides), piece_streams([*sides], _PIECE_STREAMS) as pieces:
                for broadcast in sorted(broadcasts, key=lambda broadcast: at_once.isdisjoint(broadcast.indices)):
                    if len(sent) == _FLATS_HELD:
                        oldest, sent_event = sent.popleft()
                        sent_event.make_wait(filling)
                        del oldest
                    sent.append(self._launch(broadcast, sides, filling, pieces))
        finally:
            Event(sides[root]).make_wait(filling)
            sent.clear()
        for device, stream in self._computing.items():
            # On the root, a stream that waits for the send has waited for the read too.
            for arrival in {self._arrived[device][i] for i in at_once & self._read.keys()}:
                arrival.make_wait(stream)

    def _launch(
        self,
        broadcast: FlatBroadcast,
        sides: Mapping[torch.device, torch.Stream],
        filling: torch.Stream,
        pieces: PieceStreams,
    ) -> tuple[Tensor, Event]:
        """Fills a flat buffer and sends it. Returns the buffer and an event after the send."""
        root = self._slots[0]
        sources = [broadcast.tensors[i] for i in broadcast.bucket.indices]
        self._held += [broadcast.buffers, [source.untyped_storage() for source in sources]]
        with streams_set({root: filling}):
            flat = flatten(broadcast.bucket, broadcast.tensors)
        read = Arrival(filling)
        Event(filling).make_wait(sides[root])
        broadcast.send(flat)
        arrived = {device: Arrival(*(pieces.take_used(device) or (side,))) for device, side in sides.items()}
        for i in broadcast.indices:
            self._read[i] = read
            for device, arrival in arrived.items():
                self._arrived[device][i] = arrival
        return flat, Event(sides[root])

    def expect(self, expected: ExpectedArrivals, slot: int, positions: int) -> None:
        """Fills ``expected`` for the replica on ``slot``. Negative positions count from the end of the plan."""
        device = self._slots[slot]
        arrivals = self._read if device == self._slots[0] else self._arrived[device]
        expected.device_index = device.index
        expected.by_position = [*map(arrivals.get, range(positions))]

    def wait_for_copies(self) -> None:
        """Makes the computing streams wait for the copies, and releases the memory that is held."""
        if self._held:
            for device, stream in self._computing.items():
                Event(kept_stream(device, "parameters")).make_wait(stream)
            self._held.clear()


LATE_FROM_BYTES = 16 * 2**20
"""Copies of a smaller model arrive within a fraction of a millisecond. The lookups of one forward would cost the host
about as much, because each takes about a microsecond more if copies may be late."""

_call = threading.local()


class LateCopies:
    """All `Arrivals` of one call, which makes some inside `may_begin` if ``allowed``."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self.arrivals: list[Arrivals] = []

    @contextmanager
    def may_begin(self) -> Iterator[None]:
        """Inside the block, `arrivals_for` lets copies be late in this thread, if the call allows it."""
        outer = getattr(_call, "copies", None)
        try:
            _call.copies = self if self._allowed else None
            yield
        finally:
            _call.copies = outer

    def wait_for_copies(self) -> None:
        """Makes the computing streams wait for all copies of the call."""
        while self.arrivals:
            self.arrivals[-1].wait_for_copies()
            self.arrivals.pop()  # after the wait: if the wait fails, the memory is held as long as this object


def arrivals_for(slots: Sequence[torch.device], tensors: Sequence[Tensor]) -> Arrivals | None:
    """`Arrivals` for new replicas on ``slots``; ``None`` if their copies may not be late.

    Where code has been compiled they may not, because such code may read parameters past the registries. ``tensors``:
    each replica gets copies of them.
    """
    call: LateCopies | None = getattr(_call, "copies", None)
    if call is None or sum([tensor.numel() * tensor.itemsize for tensor in tensors]) < LATE_FROM_BYTES:
        return None
    if says_no(VARIABLE) or _torch.note_whether_compiler_is_in_use() or not run_apart(slots):
        return None
    arrivals = Arrivals(slots)
    call.arrivals.append(arrivals)
    return arrivals
