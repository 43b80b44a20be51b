"""From a recorded step of the module alone to that of a process for each device, and to one that launches one graph.

``one_graph`` makes a graph of a step's kernels, as a program that captures its whole step does, and ``ddp`` adds what
``DistributedDataParallel`` sends. No process waits for another one, and nothing but the all-reduces is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nogpu.timeline import HOST, Launch, Recording, StreamName
from timelines import Recorded


@dataclass(frozen=True)
class Arrival:
    """A gradient: how many launches of the step came before it, and its bytes."""

    launches: int
    nbytes: int


def changed(found: Recorded, change: Callable[[Sequence[Launch]], Sequence[Launch]], streams: int = 0) -> Recorded:
    """``found`` with each of its two steps changed alike: indices in a step count from its own begin.

    ``streams``: how many more streams the launches name then.
    """
    length = len(found.one.launches)
    more = tuple(StreamName(0, 1000 + number) for number in range(streams))
    steps = []
    for begin in (0, length):
        own = found.two.launches[begin : begin + length]
        steps.append(change([_moved(launch, -begin) for launch in own]))
    second = [_moved(launch, len(steps[0])) for launch in steps[1]]
    names = (*found.two.streams, *more)
    return Recorded(Recording(names, tuple(steps[0])), Recording(names, (*steps[0], *second)))


def _moved(launch: Launch, by: int) -> Launch:
    """The launch with all indices moved. Waits for another step, which nothing here has, are dropped."""

    def moved(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(index + by for index in indices if index + by >= 0)

    return replace(
        launch,
        index=launch.index + by,
        waits=moved(launch.waits),
        host_waits=moved(launch.host_waits),
        issued_after=moved(launch.issued_after),
        graph=None if launch.graph is None else launch.graph + by,
    )


def one_graph(launches: Sequence[Launch]) -> Sequence[Launch]:
    """The step with all launches in one graph, but for copies from the host. One thread launches them."""
    kernels = [launch.index for launch in launches if launch.copy is None or launch.copy[0] != HOST]
    inside = set(kernels)
    return [
        replace(
            launch,
            thread=0,
            in_backward=False,
            issued_after=(),
            host_waits=(),
            graph=kernels[0] if launch.index in inside else None,
            host_seconds=0.0 if launch.index in inside and launch.index != kernels[0] else launch.host_seconds,
        )
        for launch in launches
    ]


FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes: defaults of DistributedDataParallel


def buckets_of(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The buckets of DDP, in which gradients lie in the order of their arrival. A bucket arrives with its last one."""
    found: list[Arrival] = []
    nbytes = 0
    for place, arrival in enumerate(arrivals):
        nbytes += arrival.nbytes
        if nbytes >= (BUCKET if found else FIRST_BUCKET) or place == len(arrivals) - 1:
            found.append(Arrival(arrival.launches, nbytes))
            nbytes = 0
    return found


def ddp(launches: Sequence[Launch], arrivals: Sequence[Arrival], devices: int, stream: int) -> Sequence[Launch]:
    """The step with an all-reduce for each bucket, on a stream of its own. The optimizer waits for all of them.

    An all-reduce takes the latency of a copy and the time that its bytes take over one link: 2 (N - 1) / N of the
    bucket's.
    """
    last_backward = max(launch.index for launch in launches if launch.in_backward)
    due: dict[int, int] = {}
    for bucket in buckets_of(arrivals):
        due[bucket.launches - 1] = due.get(bucket.launches - 1, 0) + bucket.nbytes
    place: dict[int, int] = {}
    result: list[Launch] = []
    sums: list[int] = []
    for launch in launches:
        place[launch.index] = len(result)

        def at(indices: Sequence[int]) -> tuple[int, ...]:
            return tuple(place[index] for index in indices)

        waits = at(launch.waits)
        if launch.index == last_backward + 1:
            waits = (*waits, *sums[-1:])
        result.append(
            replace(
                launch,
                index=len(result),
                waits=waits,
                host_waits=at(launch.host_waits),
                issued_after=at(launch.issued_after),
            )
        )
        if launch.index in due:
            sent = round(2 * (devices - 1) / devices * due[launch.index])
            sums.append(len(result))
            result.append(
                replace(
                    result[-1],
                    index=len(result),
                    op="all-reduce",
                    stream=stream,
                    bytes_read=sent,
                    bytes_written=sent,
                    flops=0,
                    copy=(0, 1),
                    waits=(result[-1].index,),
                    joins=None,
                    host_waits=(),
                    issued_after=(),
                    host_seconds=0.0,
                )
            )
    return result
