"""Recordings that are written by hand, and machines on which every time is a small whole number.

On `machine(...)` a device computes one FLOP and a path carries one byte in a second, and nothing else takes time. So
``program.kernel(stream, 3)`` is a kernel of three seconds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nogpu.timeline import (
    HOST,
    Host,
    Launch,
    Machine,
    Recording,
    Schedule,
    StreamName,
    Wiring,
    schedule,
)
from nogpu.timeline.wiring import switch

__all__ = ["Program", "machine", "run", "times", "wired"]


def wired(devices: int, capacity: int = 1) -> Wiring:
    """All to all, at one byte per second; ports and the ways to the host serve `capacity` copies at a time."""
    wiring = switch(devices, bandwidth=1, latency=0, host_bandwidth=1, host_latency=0)
    return Wiring(dict.fromkeys(wiring.links, capacity), wiring.paths)


def machine(devices: int = 2, wiring: Wiring | None = None, host: Host | None = None, **rates: Any) -> Machine:
    free = {"flops": {"float32": 1}, "memory_bandwidth": math.inf, "kernel_latency": 0, **rates}
    return Machine("hand-made", devices, **free, wiring=wiring or wired(devices), host=host or Host.free())


class Program:
    """Launches in the order in which they are written.

    A stream is ``(device, id)``, a launch its index. What `after` names is waited for by the stream. Copies between
    devices are ordered as torch orders them: against the current stream of the target too, unless there is none.
    """

    def __init__(self) -> None:
        self.streams: list[StreamName] = []
        self.launches: list[Launch] = []
        self._waited: dict[int, tuple[int, ...]] = {}  # what the next launch of a stream is ordered after

    def _stream(self, name: tuple[int, int]) -> int:
        if StreamName(*name) not in self.streams:
            self.streams.append(StreamName(*name))
        return self.streams.index(StreamName(*name))

    def _launch(self, stream: tuple[int, int], after: Sequence[int], **fields: Any) -> int:
        position, index = self._stream(stream), len(self.launches)
        blank = Launch(index, "", 0, False, position, 0, 0, 0, "float32", (), None, (), None, (), (), 0.0)
        waits = (*self._waited.pop(position, ()), *after)
        self.launches.append(replace(blank, **{**fields, "waits": tuple(dict.fromkeys(waits))}))
        return index

    def kernel(self, stream: tuple[int, int], seconds: int = 1, *, after: Sequence[int] = (), **fields: Any) -> int:
        return self._launch(stream, after, **{"op": "aten::mm", "flops": seconds, **fields})

    def copy(
        self,
        stream: tuple[int, int],
        target: int,
        seconds: int = 1,
        *,
        current: tuple[int, int] | None = None,
        source: int | None = None,
        after: Sequence[int] = (),
        **fields: Any,
    ) -> int:
        """A copy on `stream` to the device `target`, whose current stream is `current`."""
        joins = None if current is None else self._stream(current)
        if joins is not None:
            own = [launch.index for launch in self.launches if launch.stream == joins][-1:]
            after = [*after, *own, *self._waited.get(joins, ())]
        places = (stream[0] if source is None else source, target)
        size = {"bytes_read": seconds, "bytes_written": seconds}
        index = self._launch(
            stream, after, **{"op": "aten::_copy_from", "copy": places, "joins": joins, **size, **fields}
        )
        if joins is not None:
            self._waited[joins] = (index,)
        return index

    def pull(
        self, stream: tuple[int, int], sizes: Mapping[int, int], *, after: Sequence[int] = (), **fields: Any
    ) -> int:
        """A kernel that reads so many bytes of each of these devices, one after the other."""
        peers = tuple((source, stream[0], size) for source, size in sizes.items())
        return self._launch(stream, after, **{"op": "pull", "peers": peers, **fields})

    def from_host(self, stream: tuple[int, int], seconds: int = 1, **fields: Any) -> int:
        return self.copy(stream, stream[0], seconds, source=HOST, **fields)

    def to_host(self, stream: tuple[int, int], seconds: int = 1, **fields: Any) -> int:
        return self.copy(stream, HOST, seconds, **fields)

    def recording(self) -> Recording:
        return Recording(tuple(self.streams), tuple(self.launches))


def run(program: Program, on: Machine | None = None) -> Schedule:
    recording = program.recording()
    devices = [stream.device for stream in recording.streams]
    devices += [place for launch in recording.launches for place in launch.copy or ()]
    devices += [source for launch in recording.launches for source, _, _ in launch.peers]
    return schedule(recording, on or machine(1 + max(devices, default=0)))


def times(result: Schedule) -> list[tuple[float, float]]:
    return [*zip(result.start, result.end, strict=True)]
