"""How tables, pictures and traces name streams and places, and in which order they show streams."""

from __future__ import annotations

from collections.abc import Sequence

from dataparallel.testing.simulated.timeline.launches import HOST, Launch, StreamName

__all__ = ["by_device", "name_of_launch", "name_of_stream"]


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
