"""`PieceStreams`: several streams on each device, so that it receives one piece of a buffer while it sends another.

torch orders a copy between devices against the current streams of both. On one stream, a device that passes data on
cannot receive while it sends. ``comm.routes`` and ``comm.matrices`` say which copy takes which stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from dataparallel.comm.streams.current import current_streams, kept_stream
from dataparallel.devices import current_device_set

RECEIVING, SENDING = 0, 1
"""The numbers of a device's streams: it receives on the caller's stream, and sends on a further one."""


def wavefront(hops: int, pieces: int) -> list[tuple[int, int]]:
    """Pairs of hop and piece, in the order in which the host launches them so that no device waits for the host."""
    steps = range(hops + pieces - 1)
    return [(step - piece, piece) for step in steps for piece in range(pieces) if 0 <= step - piece < hops]


class PieceStreams:
    """For each device of a call the caller's current stream, which has number 0, and further ones.

    Nothing orders the streams of a device against each other, except copies that share a stream of another device.
    ``broadcast_pieces``: how many pieces have been sent along chains; the next piece takes the next stream.
    """

    def __init__(self, streams: Mapping[torch.device, Sequence[torch.Stream]]) -> None:
        self._streams = streams
        self._current = dict.fromkeys(streams, 0)
        self._used: dict[torch.device, set[int]] = {device: set() for device in streams}
        self.broadcast_pieces = 0

    def of_device(self, device: torch.device) -> Sequence[torch.Stream]:
        """The device's streams; none if all work stays on the caller's."""
        return self._streams.get(device, ())

    def take_used(self, device: torch.device) -> Sequence[torch.Stream]:
        """The device's streams that `use` has made current since the last call of this method, or else stream 0."""
        streams, used = self.of_device(device), self._used.get(device, set())
        used_streams = [stream for number, stream in enumerate(streams) if number in used]
        used.clear()
        return used_streams or streams[:1]

    def are_for(self, devices: Iterable[torch.device]) -> bool:
        """True if all of ``devices`` have streams here, and stream 0 of each is its current stream."""
        here = current_streams(devices)
        return all(device in self._streams and self._streams[device][0] == here[device] for device in here)

    def use_first(self) -> None:
        """Makes the caller's streams current again."""
        for device in self._streams:
            self._make_current(device, 0)

    def order(self, device: torch.device, first: int, then: int) -> None:
        """Makes stream ``then`` of the device wait for all that stream ``first`` has been given."""
        streams = self.of_device(device)
        if len(streams) > 1:
            streams[then % len(streams)].wait_stream(streams[first % len(streams)])

    def use(self, device: torch.device, number: int) -> None:
        """Makes stream ``number``, modulo the number of streams, of the device current. On the CPU it does nothing."""
        if device in self._streams:
            number %= len(self._streams[device])
            self._used[device].add(number)
            self._make_current(device, number)

    def _make_current(self, device: torch.device, number: int) -> None:
        if self._current[device] != number:
            torch.accelerator.set_stream(self._streams[device][number])
            self._current[device] = number


_shared = threading.local()


@contextmanager
def piece_streams(devices: Iterable[torch.device], number: int = 2) -> Iterator[PieceStreams]:
    """Inside the block, `PieceStreams.use` makes one of ``number`` streams of a device current.

    At the beginning each further stream waits for the caller's stream. At the end, also after an error, the caller's
    stream waits for them and is current again, so nothing needs ``record_stream``. Two streams are enough if all pieces
    take the same time; with a third one, late pieces catch up. With fewer than two accelerators, or with ``number=1``,
    nothing can overlap, and all work stays on the caller's streams.
    """
    here = current_streams(devices)
    streams: dict[torch.device, list[torch.Stream]] = {}
    if len(here) > 1 < number:
        streams = {
            device: [stream, *(kept_stream(device, "pieces", further) for further in range(number - 1))]
            for device, stream in here.items()
        }
    pieces = PieceStreams(streams)
    if not streams:
        yield pieces
        return
    # `torch.accelerator.set_stream` changes the current device, which is restored once, at the end.
    with current_device_set(next(iter(streams))):
        for current, *further in streams.values():
            for stream in further:
                stream.wait_stream(current)
        try:
            yield pieces
        finally:
            pieces.use_first()
            for current, *further in streams.values():
                for stream in further:
                    current.wait_stream(stream)


def are_pieces_under_way(devices: Sequence[torch.device]) -> bool:
    """True inside a block of `shared_piece_streams` for these devices, once pieces have been sent there."""
    outer: PieceStreams | None = getattr(_shared, "streams", None)
    return outer is not None and outer.broadcast_pieces > 0 and outer.are_for(devices)


@contextmanager
def shared_piece_streams(devices: Sequence[torch.device], number: int = 2) -> Iterator[PieceStreams]:
    """`piece_streams`; but a block inside another block for the same devices, in one thread, shares the outer streams.

    Such an inner block orders nothing at its beginning and end, and ignores ``number``, so buffers follow each other
    without waiting. The buffers have to exist before the outer block. Work that uses a buffer inside the outer block
    has to wait for the streams that received it (`PieceStreams.take_used`).
    """
    outer: PieceStreams | None = getattr(_shared, "streams", None)
    if outer is not None and outer.are_for(devices):
        try:
            yield outer
        finally:
            outer.use_first()
        return
    with piece_streams(devices, number) as streams:
        _shared.streams = streams
        try:
            yield streams
        finally:
            _shared.streams = outer
