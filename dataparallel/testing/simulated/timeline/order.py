"""The host order: the one order in which the interpreter lock and the links serve the launches of a recording.

It depends on the recording alone. If the machine had a say, a faster device could change who comes first, and a step
could become longer on a faster machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataparallel.testing.simulated.timeline.launches import Launch, Recording

__all__ = ["checked", "host_order", "knows_issued", "stream_before"]


def checked(recording: Recording) -> Recording:
    """The recording, if its launches are numbered, name streams that exist, and wait for earlier ones only.

    Raises:
        ValueError: otherwise. It names the launch.
    """
    for position, launch in enumerate(recording.launches):
        what = f"launch {position} ({launch.op})"
        if launch.index != position:
            raise ValueError(f"{what} has index {launch.index}: launches are numbered from 0 in their order")
        for stream in (launch.stream, launch.joins):
            if stream is not None and not 0 <= stream < len(recording.streams):
                raise ValueError(f"{what} names stream {stream}; the recording has {len(recording.streams)}")
        for name in ("waits", "host_waits", "issued_after"):
            if late := [other for other in getattr(launch, name) if not 0 <= other < position]:
                raise ValueError(f"{what} has {late} among its {name}: only launches before it can be there")
    return recording


def stream_before(recording: Recording) -> list[int | None]:
    """For each launch the one before on its stream."""
    last: dict[int, int] = {}
    before: list[int | None] = []
    for launch in recording.launches:
        before.append(last.get(launch.stream))
        last[launch.stream] = launch.index
    return before


def knows_issued(launch: Launch, before: int | None) -> Iterator[int]:
    """The launches that have been issued when this one is, whatever the machine; without those of its own thread."""
    yield from launch.issued_after
    yield from launch.waits
    if before is not None:
        yield before


def host_order(recording: Recording) -> list[int]:
    """Indices of all launches, in a fair merge of the threads.

    It is the order on a host where each launch keeps its thread for one unit of time, where any number of threads
    issue at once, and where the devices take no time. Launches of one time come by index. A launch comes after all
    launches that it waits for.
    """
    free: dict[int, int] = {}
    times: list[int] = []
    for launch, before in zip(recording.launches, stream_before(recording), strict=True):
        time = free.get(launch.thread, 0)
        for other in (*knows_issued(launch, before), *launch.host_waits):
            time = max(time, times[other])
        times.append(time)
        free[launch.thread] = time + 1
    return sorted(range(len(times)), key=times.__getitem__)
