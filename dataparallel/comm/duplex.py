"""Two streams on each device, so that it receives one piece of a buffer while it sends another.

torch orders a copy between devices against the current streams of both. On one stream for each device, a device that
passes data on receives or sends, never both. `two_streams` adds a second stream to the current one. The routes in
``comm.chain`` and ``comm.shards`` say which copy takes which. These orders hold:

- At the beginning each second stream waits for the current stream. So it may use everything that was launched there,
  and memory that was allocated there.
- In between nothing orders the two streams of a device against each other, except copies that share a stream of another
  device.
- At the end each current stream waits for the second stream, also after an error. So nothing needs ``record_stream``:
  memory of the current stream may be freed as if there had been no other.

Buffers that follow each other would wait for each other there: a device begins to receive the next one only when it has
sent the last piece of the one before. So a caller that sends several of them opens `two_streams_kept` around them, and
both happens once, around all. In between, the second streams know nothing of what is launched on the current ones: the
buffers have to be there before the block. What uses a buffer inside of it waits for both streams (`TwoStreams.of`).

One wait costs the host as much as half a launch, and there are two for each device. Choosing the stream of a copy costs
a tenth of that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from dataparallel.devices import current_device_set
from dataparallel.streams.current import current_streams, kept_stream

__all__ = ["TwoStreams", "two_streams", "two_streams_kept"]


def _second_stream(device: torch.device) -> torch.Stream:
    return kept_stream(device, "second of two")


class TwoStreams:
    """The caller's current stream and the second one, for each device of a call.

    Attributes:
        turn: which of the two gets the next piece. It goes on from one buffer to the next.
    """

    def __init__(self, streams: Mapping[torch.device, tuple[torch.Stream, torch.Stream]]) -> None:
        self._streams = streams
        self._used = dict.fromkeys(streams, 0)
        self.turn = 0

    def of(self, device: torch.device) -> tuple[torch.Stream, ...]:
        """The streams on which the device may have been given work; none if all work stays on the caller's."""
        return self._streams.get(device, ())

    def has(self, devices: Iterable[torch.device]) -> bool:
        """True if it is for these devices, and their current streams are its first ones."""
        here = current_streams(devices)
        return all(device in self._streams and self._streams[device][0] == here[device] for device in here)

    def use_first(self) -> None:
        """Makes the caller's streams current."""
        for device in self._streams:
            self.use(device, 0)

    def use(self, device: torch.device, which: int) -> None:
        """Makes stream 0 (the caller's) or 1 (the second) of the device current. On the CPU it does nothing."""
        if self._used.get(device, which) != which:
            torch.accelerator.set_stream(self._streams[device][which])
            self._used[device] = which


_kept = threading.local()


@contextmanager
def two_streams(devices: Iterable[torch.device]) -> Iterator[TwoStreams]:
    """Inside, `TwoStreams.use` says which stream of a device is current. Afterwards the caller's streams are.

    With fewer than two accelerators there is nothing to overlap: all work stays on the caller's streams.
    """
    here = current_streams(devices)
    streams = {device: (here[device], _second_stream(device)) for device in here} if len(here) > 1 else {}
    used = TwoStreams(streams)
    if not streams:
        yield used
        return
    # `torch.accelerator.set_stream` changes the current device: here it is put back once, at the end.
    with current_device_set(next(iter(streams))):
        for current, second in streams.values():
            second.wait_stream(current)
        try:
            yield used
        finally:
            for device, (current, second) in streams.items():
                used.use(device, 0)
                current.wait_stream(second)


@contextmanager
def two_streams_kept(devices: Sequence[torch.device], opens: bool = True) -> Iterator[TwoStreams]:
    """`two_streams`, or those of a block of this function around this one in the thread, if it is for these devices.

    Those go on: nothing is ordered at the beginning and at the end of the block inside. With ``opens=False`` all work
    stays on the caller's streams if there is no block around.
    """
    outer: TwoStreams | None = getattr(_kept, "streams", None)
    if outer is not None and outer.has(devices):
        try:
            yield outer
        finally:
            outer.use_first()
        return
    with two_streams(devices if opens else ()) as streams:
        _kept.streams = streams
        try:
            yield streams
        finally:
            _kept.streams = outer
