"""`results` computes figures from the records: the stages on the caller's thread, the slots, the bytes.

The ranges of a thread are nested. The *exclusive* time of a range is its time without the time of ranges inside it. So
the exclusive times of a thread and the time outside of all ranges add up to the time of the block.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dataparallel.tracing.intervals import covered, parents, union
from dataparallel.tracing.recorder import Recorder, Span, Thread

STAGES = {
    "scatter": "scatter",
    "replicate": "replicate",
    "parallel_apply": "forward",
    "replica": "forward",
    "unshard": "unshard",
    "gather": "gather",
    "backward": "backward",
    "reduce_add": "sums",
    "optimizer": "optimizer",
}
"""The stage of each range, in the order of a step. A range of another name is a stage of its own."""

REST = "your code"  # the stage of time outside of all ranges

_WAITING = frozenset({"parallel_apply", "backward"})  # ranges in which a thread mostly waits, without Python's lock


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: one of `STAGES`, or `REST`.
        calls: how many ranges of the stage the caller's thread had.
        seconds: the exclusive time of these ranges.
        running: the part of ``seconds`` in which the caller's thread ran. In the rest it waited: for other threads, a
            lock, a core or a device. ``None`` for `REST`.
        no_core: the part of ``seconds`` in which the thread could run and had no core; ``None`` if it is not known.
        elsewhere: the exclusive time of the stage in all other threads together.
        elsewhere_running: the part of ``elsewhere`` in which those threads ran.
    """

    name: str
    calls: int
    seconds: float
    running: float | None
    no_core: float | None
    elsewhere: float
    elsewhere_running: float


@dataclass(frozen=True)
class Slot:
    """The forward passes of the replicas of one slot, in seconds of all calls together.

    Attributes:
        calls: how many forward passes the slot had.
        forward: the time from the beginning to the end of the passes.
        running: the part of ``forward`` in which the thread ran.
        no_permit: the time without a permit: before the passes began, and after nested calls.
        no_core: the time in which the thread could run and had no core; ``None`` if the system does not tell.
        lock: at most this long they waited for Python's lock: the thread neither ran nor waited for any of the above,
            while other threads were in ranges too. Waits for a device or for intra-op threads may be included.
        work: the time without known waits and ranges inside; measured on the device if its events have times.
        device_forward, device_backward: the time on the device, if its events have times.
    """

    slot: int
    device: torch.device
    calls: int
    forward: float
    running: float
    no_permit: float
    no_core: float | None
    lock: float
    work: float
    device_forward: float | None
    device_backward: float | None


@dataclass(frozen=True)
class Sent:
    """The copies of one stage between devices along one route. ``busiest``: the pair of devices with the most bytes."""

    stage: str
    route: str
    copies: int
    number_of_bytes: int
    busiest: tuple[torch.device, torch.device]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of tensors on one device, which its slots share: before and after the block, and the peak in between."""

    device: torch.device
    slots: tuple[int, ...]
    before: int
    after: int
    peak: int


@dataclass(frozen=True)
class Results:
    """All figures of a trace.

    Attributes:
        seconds: the time of the block.
        behind: for how long the host waited for devices when the block had ended.
        steps: the steps of the optimizer that made most steps, else the backward passes, else the calls.
        stages: in the order of a step; their ``seconds`` add up to the time of the block.
        slots: the slots that have run.
        imbalance: the slowest replica's work (`Slot.work`) divided by the mean work of its call; 1.0 if not known.
        sent: the copies by stage and route.
        memory: the memory of the accelerators that have run.
        modules, forms: the classes of the modules that were called, and how often; and the forms that called them.
        records: how many ranges, waits and copies were recorded.
    """

    seconds: float
    behind: float
    steps: int
    stages: list[Stage]
    slots: list[Slot]
    imbalance: float
    sent: list[Sent]
    memory: list[DeviceMemory]
    modules: Mapping[str, int]
    forms: Sequence[str]
    records: int

    def stage(self, name: str) -> Stage:
        """The stage of this name; one without time if there was none."""
        return next((stage for stage in self.stages if stage.name == name), Stage(name, 0, 0.0, None, None, 0.0, 0.0))


def stage_of(name: str) -> str:
    """The stage of a range. Outside of all ranges it is the user's code."""
    return STAGES.get(name, name or REST)


def results(recorder: Recorder, seconds: float, behind: float, memory: list[DeviceMemory]) -> Results:
    """Computes the figures of a block that took so many seconds."""
    spans = _exclusive_times(recorder.spans)
    replicas = _replicas(recorder, spans)
    modules = Counter({span.call: span.detail for span in recorder.spans if span.name == "replica"}.values())
    return Results(
        seconds=seconds,
        behind=behind,
        steps=_steps(recorder.spans, recorder.caller, len({replica.call for replica in replicas})),
        stages=_stages(spans, recorder.caller, seconds),
        slots=_slots(recorder, replicas),
        imbalance=_imbalance(replicas),
        sent=_sent(recorder),
        memory=memory,
        modules=modules,
        forms=list(dict.fromkeys(span.detail for span in recorder.spans if span.name == "replicate" and span.detail)),
        records=len(recorder.spans) + len(recorder.waits) + len(recorder.copies) + len(recorder.marks),
    )


@dataclass
class _Exclusive:
    """A range with its exclusive times in nanoseconds. ``is_inner``: the range around it is of the same stage."""

    span: Span
    time: int
    ran: int
    core: int | None
    is_inner: bool = False


def _exclusive_times(spans: Sequence[Span]) -> list[_Exclusive]:
    by_thread: dict[Thread, list[Span]] = defaultdict(list)
    for span in spans:
        by_thread[span.thread].append(span)
    found: list[_Exclusive] = []
    for of_thread in by_thread.values():
        own = [_Exclusive(span, span.end - span.start, span.ran, span.core) for span in of_thread]
        for inner, parent in zip(own, parents([(span.start, span.end) for span in of_thread]), strict=True):
            if parent is not None:
                outer = own[parent]
                outer.time -= inner.span.end - inner.span.start
                outer.ran = max(0, outer.ran - inner.span.ran)
                if outer.core is not None and inner.span.core is not None:
                    outer.core = max(0, outer.core - inner.span.core)
                inner.is_inner = stage_of(outer.span.name) == stage_of(inner.span.name)
        found += own
    return found


def _steps(spans: Sequence[Span], caller: Thread, calls: int) -> int:
    steps = Counter(span.call for span in spans if span.name == "optimizer")
    if steps:
        return max(steps.values())
    return sum(span.name == "backward" and span.thread == caller for span in spans) or calls


def _stages(spans: Sequence[_Exclusive], caller: Thread, seconds: float) -> list[Stage]:
    calls, here, ran, core, elsewhere, ran_elsewhere = (Counter[str]() for _ in range(6))
    for each in spans:
        name = stage_of(each.span.name)
        if each.span.thread == caller:
            calls[name] += not each.is_inner
            here[name] += each.time
            ran[name] += each.ran
            core[name] += each.core or 0
        else:
            elsewhere[name] += each.time
            ran_elsewhere[name] += each.ran
    names = [name for name in dict.fromkeys([*STAGES.values(), *here, *elsewhere]) if name in {*here, *elsewhere}]
    without_core = {stage_of(each.span.name) for each in spans if each.core is None}
    found = [
        Stage(
            name,
            calls[name],
            1e-9 * here[name],
            running=1e-9 * min(ran[name], here[name]),
            no_core=None if name in without_core else 1e-9 * min(core[name], here[name]),
            elsewhere=1e-9 * elsewhere[name],
            elsewhere_running=1e-9 * min(ran_elsewhere[name], elsewhere[name]),
        )
        for name in names
    ]
    rest = max(0.0, seconds - sum(stage.seconds for stage in found))
    return [*found, Stage(REST, 0, rest, None, None, 0.0, 0.0)]


class _Replica(NamedTuple):
    """One replica's forward, in seconds. ``work``: see `Slot`."""

    call: int
    slot: int
    forward: float
    ran: float
    core: float | None
    lock: float
    device: float | None
    work: float


def _replicas(recorder: Recorder, spans: Sequence[_Exclusive]) -> list[_Replica]:
    waiting: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for wait in recorder.waits:
        waiting[wait.call, wait.slot].append((wait.start, wait.end))
    busy = _busy(recorder.spans)
    found = []
    for each in spans:
        span = each.span
        if span.name != "replica" or span.slot is None:
            continue
        interval, time = (span.start, span.end), span.end - span.start
        core = min(each.core or 0, max(0, each.time - each.ran))
        waited = covered(interval, union(waiting[span.call, span.slot]))
        busy_elsewhere = covered(interval, busy[span.thread])
        lock = max(0.0, min(each.time - each.ran - core - waited, busy_elsewhere))
        on_device = [] if span.marks is None else [*recorder.clock.seconds(*span.marks).values()]
        device = on_device[0] if on_device else None
        work = max(0.0, (1e-9 * time if device is None else device) - 1e-9 * (time - each.time + core + waited + lock))
        found.append(
            _Replica(
                span.call, span.slot, 1e-9 * time, 1e-9 * span.ran,
                None if span.core is None else 1e-9 * min(span.core, time), 1e-9 * lock, device, work,
            )
        )  # fmt: skip
    return found


def _slots(recorder: Recorder, replicas: Sequence[_Replica]) -> list[Slot]:
    by_slot: dict[int, list[_Replica]] = defaultdict(list)
    for replica in replicas:
        by_slot[replica.slot].append(replica)
    no_permit: Counter[int] = Counter()
    for wait in recorder.waits:
        no_permit[wait.slot] += wait.end - wait.start
    backward = _device_backward(recorder)
    found = []
    for slot, own in sorted(by_slot.items()):
        device = recorder.devices[slot]
        cores = [replica.core for replica in own if replica.core is not None]
        times = [replica.device for replica in own if replica.device is not None]
        found.append(
            Slot(
                slot=slot,
                device=device,
                calls=len(own),
                forward=sum(replica.forward for replica in own),
                running=sum(replica.ran for replica in own),
                no_permit=1e-9 * no_permit[slot],
                no_core=sum(cores) if len(cores) == len(own) else None,
                lock=sum(replica.lock for replica in own),
                work=sum(replica.work for replica in own),
                device_forward=sum(times) if times else None,
                device_backward=backward.get(device),
            )
        )
    return found


def _busy(spans: Iterable[Span]) -> dict[Thread, list[tuple[float, float]]]:
    """For each thread the times in which any other thread was in a range where it may have held Python's lock."""
    own: dict[Thread, list[tuple[float, float]]] = {span.thread: [] for span in spans}
    for span in spans:
        if span.name not in _WAITING:
            own[span.thread].append((span.start, span.end))
    return {
        thread: union(interval for other, intervals in own.items() if other != thread for interval in intervals)
        for thread in own
    }


def _device_backward(recorder: Recorder) -> dict[torch.device, float]:
    found: dict[torch.device, float] = defaultdict(float)
    for span in recorder.spans:
        if span.name == "backward" and span.marks is not None:
            for device, seconds in recorder.clock.seconds(*span.marks).items():
                found[device] += seconds
    return found


def _imbalance(replicas: Sequence[_Replica]) -> float:
    by_call: dict[int, list[float]] = defaultdict(list)
    for replica in replicas:
        by_call[replica.call].append(replica.work)
    several = [times for times in by_call.values() if len(times) > 1]
    mean = sum([sum(times) / len(times) for times in several])
    return sum(map(max, several)) / mean if mean else 1.0


def _sent(recorder: Recorder) -> list[Sent]:
    copies: Counter[tuple[str, str]] = Counter()
    sizes: dict[tuple[str, str], Counter[tuple[torch.device, torch.device]]] = defaultdict(Counter)
    for copy in recorder.copies:
        key = stage_of(copy.stage), copy.route
        copies[key] += 1
        sizes[key][copy.source, copy.target] += copy.number_of_bytes
    order = [*dict.fromkeys(STAGES.values())]
    keys = sorted(copies, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), key))
    return [Sent(*key, copies[key], sum(sizes[key].values()), sizes[key].most_common(1)[0][0]) for key in keys]
