"""Several streams on each device, so that it receives one piece of a buffer while it sends another.

torch orders a copy between devices against the current streams of both. On one stream for each device, a device that
passes data on receives or sends, never both. ``comm.routes`` and ``comm.matrices`` say which copy takes which stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from dataparallel.comm.streams.current import current_streams, kept_stream
from dataparallel.devices import current_device_set

RECEIVING, SENDING = 0, 1
"""The streams of a device, the caller's and a further one, where one receives and the other sends."""


class PieceStreams:
    """The caller's current stream and further ones, for each device of a call. ``turn``: which gets the next piece.

    Nothing orders the streams of a device against each other, except copies that share a stream of another device.
    """

    def __init__(self, streams: Mapping[torch.device, Sequence[torch.Stream]]) -> None:
        self._streams = streams
        self._used = dict.fromkeys(streams, 0)
        self._taken: dict[torch.device, set[int]] = {device: set() for device in streams}
        self.turn = 0

    def of_device(self, device: torch.device) -> Sequence[torch.Stream]:
        """The streams on which the device may have been given work; none if all work stays on the caller's."""
        return self._streams.get(device, ())

    def taken(self, device: torch.device) -> Sequence[torch.Stream]:
        """Those of them that `use` has been asked for since the last call of this method, or else the caller's."""
        streams, taken = self.of_device(device), self._taken.get(device, set())
        found = [stream for which, stream in enumerate(streams) if which in taken]
        taken.clear()
        return found or streams[:1]

    def are_for(self, devices: Iterable[torch.device]) -> bool:
        """True if it is for these devices, and their current streams are its first ones."""
        here = current_streams(devices)
        return all(device in self._streams and self._streams[device][0] == here[device] for device in here)

    def use_first(self) -> None:
        """Makes the caller's streams current."""
        for device in self._streams:
            self._make_current(device, 0)

    def order(self, device: torch.device, first: int, then: int) -> None:
        """Makes one stream of the device wait for all that another one has been given."""
        streams = self.of_device(device)
        if len(streams) > 1:
            streams[then % len(streams)].wait_stream(streams[first % len(streams)])

    def use(self, device: torch.device, which: int) -> None:
        """Makes stream 0 (the caller's) or a further one of the device current. They are counted in a circle.

        On the CPU it does nothing.
        """
        if device in self._streams:
            which %= len(self._streams[device])
            self._taken[device].add(which)
            self._make_current(device, which)

    def _make_current(self, device: torch.device, which: int) -> None:
        if self._used[device] != which:
            torch.accelerator.set_stream(self._streams[device][which])
            self._used[device] = which


_kept = threading.local()


@contextmanager
def piece_streams(devices: Iterable[torch.device], number: int = 2) -> Iterator[PieceStreams]:
    """Inside, `PieceStreams.use` says which stream of a device is current. Afterwards the caller's streams are.

    At the beginning each further stream waits for the current one. At the end, also after an error, the current one
    waits for them, so nothing needs ``record_stream``. Two streams are enough if all pieces take the same time; with a
    third one, pieces that are behind catch up. With fewer than two accelerators, or with ``number=1``, there is nothing
    to overlap, and all work stays on the caller's streams.
    """
    here = current_streams(devices)
    streams: dict[torch.device, list[torch.Stream]] = {}
    if len(here) > 1 < number:
        streams = {
            device: [stream, *(kept_stream(device, "pieces", further) for further in range(number - 1))]
            for device, stream in here.items()
        }
    used = PieceStreams(streams)
    if not streams:
        yield used
        return
    # `torch.accelerator.set_stream` changes the current device: here it is put back once, at the end.
    with current_device_set(next(iter(streams))):
        for current, *further in streams.values():
            for stream in further:
                stream.wait_stream(current)
        try:
            yield used
        finally:
            used.use_first()
            for current, *further in streams.values():
                for stream in further:
                    current.wait_stream(stream)


def are_pieces_under_way(devices: Sequence[torch.device]) -> bool:
    """True in a block of `piece_streams_kept` for these devices in which pieces have been sent."""
    outer: PieceStreams | None = getattr(_kept, "streams", None)
    return outer is not None and outer.turn > 0 and outer.are_for(devices)


@contextmanager
def piece_streams_kept(devices: Sequence[torch.device], number: int = 2) -> Iterator[PieceStreams]:
    """`piece_streams`, or those of a block of this function around this one in the thread, if it is for these devices.

    Those go on: nothing is ordered at the beginning and at the end of the block inside, and ``number`` does not count.
    So buffers follow each other without waiting. They have to be there before the outer block, and what uses one inside
    of it waits for the streams that it came on (`PieceStreams.taken`).
    """
    outer: PieceStreams | None = getattr(_kept, "streams", None)
    if outer is not None and outer.are_for(devices):
        try:
            yield outer
        finally:
            outer.use_first()
        return
    with piece_streams(devices, number) as streams:
        _kept.streams = streams
        try:
            yield streams
        finally:
            _kept.streams = outer
