"""`rows_of` makes figures of a profile: a `Row` for each stage, and one for each replica in it. `text_of` prints them.

The times of ranges are intervals: what lies in an inner range is not counted for the outer one (`without`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEvent

Interval = tuple[float, float]
"""Beginning and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length_of_union(intervals: Iterable[Interval]) -> float:
    """For how long at least one of the intervals lasts."""
    return sum([end - start for start, end in union(intervals)])


def without(interval: Interval, others: Iterable[Interval]) -> Iterator[Interval]:
    """What is left of the interval outside of the others, which lie inside of it."""
    at, end = interval
    for start, stop in union(others):
        yield at, start
        at = stop
    yield at, end


STAGES = {
    "scatter": "scatter", "replicate": "replicate", "parallel_apply": "forward", "replica": "forward",
    "unshard": "unshard", "gather": "gather", "backward": "backward", "gradients": "sums", "reduce_add": "sums",
    "optimizer": "optimizer",
}  # fmt: skip
"""The stage of each range, in the order of a step."""

REST = "your code"  # the time outside of all ranges

_OURS = re.compile(r"dataparallel::(\w+)(?: (\d+))?$")
_NODE, _OPTIMIZER = "autograd::engine::evaluate_function: ", "Optimizer.step#"  # names that torch gives

Place = tuple[str, int | None]
"""A stage, and the replica that it worked for."""


@dataclass(frozen=True)
class Row:
    """A stage, or one replica's part of it. Times are seconds of all calls together.

    Attributes:
        stage: "scatter", "replicate", "forward", "unshard", "gather", "backward", "sums", "optimizer", another range's
            name, or "your code": the rest of the block.
        replica: the number of the slot; ``None`` for the whole stage.
        on: the slot's device, if a replica has run there.
        calls: how many ranges there were, of "forward" one for each call; 0 for "backward" and "your code".
        host: for how long at least one thread was in the stage, and in no other stage inside of it.
        device: the kernels' time, added up. Without kernels in the profile, for replicas: see `Ran`. ``None``: unknown.
        waiting: for how long replicas that were called had not begun; ``None`` for other stages.
    """

    stage: str
    replica: int | None
    on: torch.device | None
    calls: int
    host: float
    device: float | None
    waiting: float | None


class Ran(NamedTuple):
    """What no profiler records of a replica: the seconds before its turn came and, by events on its stream, those from
    before its forward to after it, gaps included. ``None``: its device has no events with times."""

    slot: int
    on: torch.device
    waiting: float
    device: float | None


def rows_of(events: Iterable[FunctionEvent], seconds: float, ran: Sequence[Ran]) -> list[Row]:
    """The rows of a block that took so many seconds, in the order of a step."""
    events = [event for event in events if event.device_type.name == "CPU" and not event.is_async]
    places = _places(events)
    inside: dict[int, list[Interval]] = defaultdict(list)
    pieces: dict[Place, list[Interval]] = defaultdict(list)
    calls: Counter[Place] = Counter()
    kernels: dict[Place, float] = defaultdict(float)
    for event in events:
        if id(event) in places and (around := _range_of(event.cpu_parent, places)) is not None:
            inside[id(around)].append(_interval(event))
    for event in events:
        stage, slot = places.get(id(_range_of(event, places)), (REST, None))
        for place in dict.fromkeys([(stage, None), (stage, slot)]):
            if id(event) in places:
                pieces[place] += without(_interval(event), inside[id(event)])
                is_part = place[1] is None and event.name.startswith("dataparallel::replica ")
                calls[place] += not (is_part or event.name.startswith(_NODE))
            if event.kernels and not event.is_user_annotation:  # torch links those to kernels that others launch
                kernels[place] += 1e-6 * sum([kernel.duration for kernel in event.kernels])

    def row(stage: str, slot: int | None) -> Row:
        own = [each for each in ran if slot in (None, each.slot)] if stage == "forward" else []
        times = [each.device for each in own if each.device is not None]
        device = kernels.get((stage, slot), 0.0) if kernels else sum(times) if times else None
        on = next((each.on for each in ran if each.slot == slot), None)
        host, waiting = length_of_union(pieces[stage, slot]), sum([each.waiting for each in own]) if own else None
        return Row(stage, slot, on, calls[stage, slot], host, device, waiting)

    order = [*dict.fromkeys([*STAGES.values(), *(stage for stage, _ in pieces)])]
    keys = sorted(pieces, key=lambda place: (order.index(place[0]), -1 if place[1] is None else place[1]))
    rest = max(0.0, seconds - length_of_union([piece for each in pieces.values() for piece in each]))
    return [*(row(*key) for key in keys), Row(REST, None, None, 0, rest, kernels.get((REST, None)), None)]


def _interval(event: FunctionEvent) -> Interval:
    return 1e-6 * event.time_range.start, 1e-6 * event.time_range.end


def _places(events: Sequence[FunctionEvent]) -> dict[int, Place]:
    """The place of each range, by ``id(event)``: correlation ids of torch and of CUDA may be the same.

    On accelerators a thread of the engine works for one device. If the ranges inside of its nodes are those of one
    replica, all that the thread does in backward is that replica's.
    """
    places: dict[int, Place] = {}
    of_thread: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if found := _OURS.match(event.name):
            places[id(event)] = STAGES.get(found[1], found[1]), None if found[2] is None else int(found[2])
        elif event.name.startswith((_NODE, _OPTIMIZER)):
            places[id(event)] = "backward" if event.name.startswith(_NODE) else "optimizer", None
    for event in events:
        slot, around = places.get(id(event), ("", None))[1], _range_of(event.cpu_parent, places)
        if slot is not None and around is not None and around.name.startswith(_NODE):
            of_thread[event.thread].add(slot)
    for event in events:
        if event.name.startswith(_NODE) and len(slots := of_thread[event.thread]) == 1:
            places[id(event)] = "backward", min(slots)
    return places


def _range_of(event: FunctionEvent | None, places: Mapping[int, Place]) -> FunctionEvent | None:
    """The smallest range that contains the event, or is the event."""
    while event is not None and id(event) not in places:
        event = event.cpu_parent
    return event


def text_of(rows: Sequence[Row], seconds: float, behind: float, advice: Sequence[str]) -> str:
    """The table of a block. ``behind``: for how long the host waited for devices when the block had ended."""
    cells = [["stage", "replica", "calls", "host ms", "%", "device ms", "waiting ms"]]
    for row in rows:
        name = row.stage if row.replica is None else ""
        replica = "" if row.replica is None else f"{row.replica}" if row.on is None else f"{row.replica} on {row.on}"
        share = f"{100 * row.host / seconds:.1f}" if row.replica is None else ""
        cells.append([name, replica, str(row.calls or ""), _ms(row.host), share, _ms(row.device), _ms(row.waiting)])
    cells.append(["the block", "", "", _ms(seconds), "100.0", "", _ms(behind)])
    timed = {row.stage for row in rows if row.device is not None}
    if timed - {"forward"}:
        device = "the kernels' time, added up, by the profiler"
    elif timed:
        device = "from before each replica's forward to after it, by events; the profile has no kernels"
    else:
        device = "not known, or CPU slots"
    notes = [f"device: {device}", "waiting: until a replica's turn came; in the last row for devices, after the block"]
    return "\n".join([_aligned(cells), *notes, *(f"to try: {sentence}" for sentence in advice)])


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of columns of the same width. The first two columns begin at the left, others end at the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.2f}"
