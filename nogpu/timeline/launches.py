"""What a recording holds: launches, in the order in which the host made them, and how people read their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HOST = -1
"""The host, as an end of a copy."""


@dataclass(frozen=True)
class StreamName:
    """Which stream.

    Attributes:
        device: the index of its device.
        id: torch's ``stream_id``; 0 is the default stream of the device.
    """

    device: int
    id: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One operator that reads or writes elements, and everything that it waits for.

    Other launches are named by their ``index``, which is always a smaller one.

    Attributes:
        index: its position in the recording.
        op: the operator, such as ``aten::addmm``.
        thread: the host thread that launched it. Threads are numbered in the order of their first launches.
        in_backward: whether that thread works for a backward pass of autograd's engine. It then holds no interpreter
            lock.
        stream: its stream, as a position in ``Recording.streams``. A copy between devices runs on a stream of its
            source.
        bytes_read: bytes of the elements that it reads.
        bytes_written: bytes of the elements that it writes, in results that it allocates too.
        flops: floating-point operations.
        dtype: ``float32`` and so on, of the largest tensor that it touches.
        shapes: of its tensor arguments.
        copy: the source and the target device of what it moves, `HOST` for the host; None if it moves nothing between
            two places.
        waits: launches on other streams that its stream has waited for since the launch before on its stream. It starts
            after they have ended.
        joins: for a copy between devices, the stream of the target that later launches there are ordered by, as a
            position in ``Recording.streams``. The last launch on it is among ``waits``, and the copy is among the
            ``waits`` of the next.
        host_waits: launches that the host thread has waited for since the launch before of this thread. It is issued
            after they have ended.
        issued_after: launches of other threads that this thread knows to have been issued, because threads have been
            started or joined. It is issued after them.
        host_seconds: CPU time of the thread from the end of its launch before to this one.
        stack: the Python stack, if stacks were asked for.
        graph: the index of the first launch of its graph, which may be itself: the host launches a captured graph by
            one call. None if it was launched by itself.
        peers: what a kernel itself moves between its device and others: for each the source, the target and the bytes,
            in the order in which the kernel comes to them. ``bytes_read`` and ``bytes_written`` are those of its own
            device's memory.
    """

    index: int
    op: str
    thread: int
    in_backward: bool
    stream: int
    bytes_read: int
    bytes_written: int
    flops: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    copy: tuple[int, int] | None
    waits: tuple[int, ...]
    joins: int | None
    host_waits: tuple[int, ...]
    issued_after: tuple[int, ...]
    host_seconds: float
    stack: str = ""
    graph: int | None = None
    peers: tuple[tuple[int, int, int], ...] = ()

    @property
    def communicates(self) -> bool:
        """Whether it moves bytes between two places: it is such a copy, or a kernel with peers."""
        return self.copy is not None or bool(self.peers)

    @property
    def is_call(self) -> bool:
        """Whether the host makes a call for it: it is no later part of a graph."""
        return self.graph is None or self.graph == self.index


@dataclass(frozen=True)
class Recording:
    """Launches in the order of the host.

    Attributes:
        streams: every stream that a launch names.
        launches: the launches. Those of one thread, and those of one stream, are in their order.
    """

    streams: tuple[StreamName, ...]
    launches: tuple[Launch, ...]

    @property
    def calls(self) -> int:
        """How many calls of the host these are."""
        return sum(launch.is_call for launch in self.launches)


def name_of_stream(stream: StreamName) -> str:
    """``device 0``, or ``device 0 stream 3`` for a stream that is not the default one."""
    return f"device {stream.device}" + (f" stream {stream.id}" if stream.id else "")


def name_of_launch(launch: Launch) -> str:
    """``addmm``, or ``_copy_from 0 to host`` for a copy between two places."""
    op = launch.op.removeprefix("aten::")
    if launch.copy is None:
        return op
    source, target = ("host" if place == HOST else str(place) for place in launch.copy)
    return f"{op} {source} to {target}"


def by_device(streams: Sequence[StreamName]) -> list[int]:
    """The positions of the streams, those of device 0 first."""
    return sorted(range(len(streams)), key=lambda position: (streams[position].device, streams[position].id))
