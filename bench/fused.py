"""What a recording would be if neighbouring kernels were one, as a compiler of kernels makes them.

Nothing here knows such a compiler. A product of matrices, an attention or a convolution stays what it is, and so does a
copy between devices. All others are merged with their neighbours on the same stream where that changes no order: a
launch is not merged with the one before if it waits for something itself, or if another thread has launched on the
stream meanwhile. A merged launch reads and writes as much as its parts together, and costs the host as much as one of
them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from nogpu.timeline import Launch, Recording

APART = ("mm", "addmm", "bmm", "baddbmm", "convolution", "attention")
"""Parts of the names of operators that compilers leave to libraries."""


def fused(recording: Recording) -> Recording:
    """The recording with fewer launches. Who waited for a part waits for the whole, which ends no earlier."""
    groups = _groups(recording)
    place = {part.index: number for number, group in enumerate(groups) for part in group}

    def moved(indices: Iterable[int], own: int) -> tuple[int, ...]:
        return tuple(sorted({place[index] for index in indices} - {own}))

    launches = []
    for number, group in enumerate(groups):
        first = group[0]
        launches.append(
            replace(
                first,
                index=number,
                op=first.op if len(group) == 1 else f"fused {group[-1].op}",
                bytes_read=sum(part.bytes_read for part in group),
                bytes_written=sum(part.bytes_written for part in group),
                flops=sum(part.flops for part in group),
                waits=moved(first.waits, number),
                host_waits=moved(first.host_waits, number),
                issued_after=moved(first.issued_after, number),
                host_seconds=statistics.mean(part.host_seconds for part in group),
            )
        )
    return Recording(recording.streams, tuple(launches))


def as_python(recording: Recording) -> Recording:
    """The recording with kernels of backward launched under the interpreter lock, where a compiled backward is Python.

    Copies are left to the library, whose own nodes make them.
    """
    launches = (
        replace(launch, in_backward=launch.in_backward and launch.copy is not None) for launch in recording.launches
    )
    return Recording(recording.streams, tuple(launches))


def without_lock(recording: Recording) -> Recording:
    """The recording with all kernels launched as a backward launches them: by C++ that has released the lock."""
    launches = (replace(launch, in_backward=launch.in_backward or launch.copy is None) for launch in recording.launches)
    return Recording(recording.streams, tuple(launches))


def _groups(recording: Recording) -> list[list[Launch]]:
    """The launches that are one, in the order of the first of each group."""
    groups: list[list[Launch]] = []
    last_on_stream: dict[int, list[Launch]] = {}
    of: dict[int, list[Launch]] = {}
    open_of_thread: dict[int, list[Launch]] = {}
    for launch in recording.launches:
        group = open_of_thread.get(launch.thread)
        awaited = (*launch.waits, *launch.host_waits, *launch.issued_after)
        for index in awaited:
            _close(of[index], open_of_thread)  # otherwise it might end only after this launch
        joins = (
            group is not None
            and not awaited
            and _is_fusible(launch)
            and group[0].stream == launch.stream
            and last_on_stream[launch.stream] is group
        )
        if not joins:
            group = []
            groups.append(group)
            open_of_thread.pop(launch.thread, None)
            if _is_fusible(launch):
                open_of_thread[launch.thread] = group
        assert group is not None
        group.append(launch)
        of[launch.index] = last_on_stream[launch.stream] = group
    return groups


def _close(group: list[Launch], open_of_thread: dict[int, list[Launch]]) -> None:
    thread = group[0].thread
    if open_of_thread.get(thread) is group:
        del open_of_thread[thread]


def _is_fusible(launch: Launch) -> bool:
    return launch.copy is None and not any(name in launch.op for name in APART)
