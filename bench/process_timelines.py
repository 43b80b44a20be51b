"""From a recorded step of the module alone to that of a process for each device, and to one that launches one graph.

``one_graph`` makes a graph of a step's kernels, as a program that captures its whole step does. ``ddp`` adds what
``DistributedDataParallel`` sends, and ``fsdp2`` what FSDP2 copies and sends. No process waits for another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from nogpu.timeline import HOST, Launch, Machine, Recording, StreamName
from published import NCCL
from recorded import Recorded, record
from sharded_blocks import blocks_of


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


@dataclass(frozen=True)
class Added:
    """A launch that is issued before launch ``before`` of the step, as one of the thread of launch ``thread_of``.

    ``waits`` names launches of the step, and others that were added, by their keys. ``stream`` is one of the
    recording, ``copy`` whether its bytes are sent.
    """

    before: int
    key: str
    thread_of: int
    stream: int
    nbytes: float
    waits: Sequence[int | str] = ()
    copy: bool = False


def woven(launches: Sequence[Launch], added: Sequence[Added], waiting: Mapping[int, Sequence[str]]) -> Sequence[Launch]:
    """The step with others between its launches. ``waiting``: what launches of the step wait for besides."""
    place: dict[int | str, int] = {}
    result: list[Launch] = []
    due: defaultdict[int, list[Added]] = defaultdict(list)
    for one in added:
        due[one.before].append(one)

    def at(indices: Iterable[int | str]) -> tuple[int, ...]:
        return tuple(place[index] for index in indices)

    for launch in launches:
        for one in due[launch.index]:
            like, size = launches[one.thread_of], round(one.nbytes)
            is_first = one.thread_of == launch.index  # of its thread perhaps: it is issued after what that is
            place[one.key] = len(result)
            result.append(
                replace(
                    like,
                    index=len(result),
                    op=one.key.split(",")[0],
                    stream=one.stream,
                    bytes_read=size,
                    bytes_written=size,
                    flops=0,
                    copy=(0, 1) if one.copy else None,
                    waits=at(one.waits),
                    joins=None,
                    host_waits=(),
                    issued_after=at(like.issued_after) if is_first else (),
                    host_seconds=0.0,
                )
            )
        place[launch.index] = len(result)
        result.append(
            replace(
                launch,
                index=len(result),
                waits=(*at(launch.waits), *at(waiting.get(launch.index, ()))),
                host_waits=at(launch.host_waits),
                issued_after=at(launch.issued_after),
            )
        )
    return result


def ddp(
    launches: Sequence[Launch], arrivals: Sequence[Arrival], devices: int, stream: int, longer: float = 1.0
) -> Sequence[Launch]:
    """The step with an all-reduce for each bucket, on a stream of its own. The optimizer waits for all of them.

    An all-reduce takes the latency of a copy, and ``longer`` than its bytes take over one link: 2 (N - 1) / N of the
    bucket's.
    """
    received = 2 * (devices - 1) / devices * longer
    optimizer = 1 + max(launch.index for launch in launches if launch.in_backward)
    due: defaultdict[int, int] = defaultdict(int)
    for bucket in buckets_of(arrivals):
        due[bucket.launches] += bucket.nbytes
    sums = [
        Added(after, f"all-reduce, {after}", after - 1, stream, received * nbytes, [after - 1], True)
        for after, nbytes in sorted(due.items())
    ]
    return woven(launches, sums, {optimizer: [one.key for one in sums[-1:]]})


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 gathers together: their bytes, and how many launches of the step came before its events.

    These are the begin of its forward and of its backward, and the arrival of its last gradient. A root, which stays
    gathered, has no ``backward``.
    """

    nbytes: int
    forward: int
    backward: int | None
    arrived: int


def fsdp2(
    launches: Sequence[Launch], units: Sequence[Unit], devices: int, stream: int, gather: float, scatter: float
) -> Sequence[Launch]:
    """The step with units that FSDP2 gathers, frees after forward, gathers again, and whose gradients it sums.

    ``units`` are in the order of forward. A gather copies the shard on ``stream``, sends there, and copies what has
    arrived where the module runs. It is one unit ahead: in forward because the host is, in backward because it is
    asked for before the unit that comes first. Gradients are copied where they were computed and summed on
    ``stream + 1``. The optimizer waits for all sums, and works on an N-th of the rows. Buffers and casts are left out.

    ``gather`` and ``scatter``: how much longer the bytes that a device receives, (N - 1) / N of the unit's, take by
    NCCL than by a copy over one link.
    """
    optimizer = 1 + max(launch.index for launch in launches if launch.in_backward)
    received = (devices - 1) / devices
    added: list[Added] = []

    def gathered(unit: Unit, at: int, way: str, after: Sequence[int | str]) -> str:
        name = f"{way} {unit.forward}"
        sent = received * unit.nbytes * gather
        added.append(Added(at, f"copy-in, {name}", at, stream, unit.nbytes / devices, after))
        added.append(Added(at, f"all-gather, {name}", at, stream, sent, (), True))
        return name

    def copied_out(unit: Unit, at: int, name: str) -> str:
        run_on = launches[at].stream
        added.append(Added(at, f"copy-out, {name}", at, run_on, unit.nbytes, [f"all-gather, {name}"]))
        return f"copy-out, {name}"

    out: list[int | str] = [units[0].forward - 1] * 2  # what the gather of the next unit but one waits for
    for unit in units:
        name = gathered(unit, unit.forward, "forward", out[-2:-1])
        out.append(copied_out(unit, unit.forward, name))
    again = sorted((unit for unit in units if unit.backward is not None), key=lambda unit: unit.backward or 0)
    ahead = gathered(again[0], again[0].backward or 0, "backward", out[-1:]) if again else ""
    for place, unit in enumerate(again):
        begin = unit.backward or 0
        last = copied_out(unit, begin, ahead)
        if place + 1 < len(again):
            ahead = gathered(again[place + 1], begin, "backward", [last])
    sums = sorted(units, key=lambda unit: unit.arrived)
    for number, unit in enumerate(sums):
        done, run_on = unit.arrived - 1, launches[unit.arrived - 1].stream
        sent = received * unit.nbytes * scatter
        added.append(Added(unit.arrived, f"copy-in, sum {number}", done, run_on, unit.nbytes))
        after = [f"copy-in, sum {number}"]
        added.append(Added(unit.arrived, f"reduce-scatter, {number}", done, stream + 1, sent, after, True))
    own = [
        replace(launch, bytes_read=launch.bytes_read // devices, bytes_written=launch.bytes_written // devices)
        if launch.index >= optimizer
        else launch
        for launch in launches
    ]
    return woven(own, added, {optimizer: [f"reduce-scatter, {len(sums) - 1}"]})


@dataclass(frozen=True)
class Alone:
    """Steps of the module alone, the gradients of a step in the order of their arrival, and the units of FSDP2.

    These are the root and each block.
    """

    steps: Recorded
    arrivals: Sequence[Arrival]
    units: Sequence[Unit]

    @classmethod
    def recorded(cls, module: nn.Module, run: Callable[[], None], simulator: Any) -> Alone:
        """``run`` makes a step of ``module``, and has made some. ``simulator`` has the timeline and the counts."""
        steps = record(run, simulator)
        arrivals: dict[torch.Tensor, Arrival] = {}
        events: defaultdict[nn.Module, list[int]] = defaultdict(list)  # begin of forward, begin of backward
        with simulator.counted() as counts:

            def comes(module: nn.Module, *_: Any) -> None:
                events[module].append(sum(counts.launches))

            def arrives(parameter: torch.Tensor) -> None:
                arrivals[parameter] = Arrival(sum(counts.launches), parameter.numel() * parameter.itemsize)

            blocks = blocks_of(module)
            hooks = [each.register_forward_pre_hook(comes) for each in (module, *blocks)]
            for block in blocks:
                hooks.append(
                    block.register_forward_hook(lambda own, _, out: out.register_hook(partial(comes, own)) and None)
                )
            hooks += [each.register_post_accumulate_grad_hook(arrives) for each in module.parameters()]
            run()
        for hook in hooks:
            hook.remove()
        in_blocks = {parameter for block in blocks for parameter in block.parameters()}
        units = []
        for each in (module, *blocks):
            own = [one for one in each.parameters() if each in blocks or one not in in_blocks]
            nbytes, last = sum(arrivals[one].nbytes for one in own), max(arrivals[one].launches for one in own)
            units.append(Unit(nbytes, *(*events[each], None)[:2], last))
        return cls(steps, [*arrivals.values()], units)

    def by_ddp(self, machine: Machine, devices: int) -> Recorded:
        """A process of DDP. Its all-reduces have the bandwidth of one link, or NCCL's where it uses several at once."""
        stream, longer = len(self.steps.two.streams), min(1.0, *nccl_beside_copies(machine))
        return changed(
            self.steps,
            partial(ddp, arrivals=self.arrivals, devices=devices, stream=stream, longer=longer),
            streams=1,
        )

    def by_fsdp2(self, machine: Machine, devices: int) -> Recorded:
        """A process of FSDP2."""
        stream, (gather, scatter) = len(self.steps.two.streams), nccl_beside_copies(machine)
        adds = partial(fsdp2, units=self.units, devices=devices, stream=stream, gather=gather, scatter=scatter)
        return changed(self.steps, adds, streams=2)


def nccl_beside_copies(machine: Machine) -> tuple[float, float]:
    """How much longer bytes of an all-gather and of a reduce-scatter by NCCL take than over one link; 1 if unknown."""
    link = machine.wiring.paths[0, 1].bandwidth
    gather, scatter = NCCL.get(machine.name, (link, link))
    return link / gather, link / scatter
