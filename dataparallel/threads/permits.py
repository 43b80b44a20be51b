"""`Permits` says how many replicas of a form run Python at a time: on CPU slots as many as there are cores.

On accelerators two hide each other's waits, and more compete for Python's lock, but a ``forward`` that waits for its
device wants all. So a form tries both in its first calls of a kind, and keeps the better one. No result depends on it.
Nothing here has a lock: threads that call at the same time can only spoil measurements.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable, Mapping
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch

from dataparallel.comm.streams.current import Event

FEW = 2
WARM_UP = 2  # the first calls of a kind allocate memory and choose kernels, so they are not measured
SAMPLES = 3  # measured calls with each number
DOUBT = 1.1  # without times of the devices: times of the host within this ratio say nothing
KINDS = 64  # a form remembers so many
STALL_TIMEOUT, STALL_CALLS = 1.0, 5.0  # if no replica ends for so many seconds, and so many shortest calls, all run


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_lock() -> bool:
    """True if only one thread at a time runs Python. A free-threaded Python may get its lock back at any import."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


Marks: TypeAlias = "dict[Any, Event]"
"""A timed event on the stream of each device."""


def marks_on(streams: Mapping[Any, torch.Stream]) -> Marks:
    """An event on each stream; none where a backend has no events with times."""
    with suppress(RuntimeError):
        return {key: Event(stream, timed=True) for key, stream in streams.items()}
    return {}


def have_passed(marks: Marks) -> bool:
    """True if the devices have passed all of these marks. The host does not wait."""
    return all(event.has_passed() for event in marks.values())


def seconds_between(begin: Marks, end: Marks) -> float:
    """Those of the slowest device, its waits included, or 0 where no event has a time. All marks have been passed."""
    with suppress(RuntimeError):
        return max((begin[key].seconds_until(end[key]) for key in begin.keys() & end.keys()), default=0.0)
    return 0.0


class _Kind:
    """What is known of calls of one kind: the ``number`` to use, and the times with those that are being tried."""

    def __init__(self, at_once: int, on_cpu: bool) -> None:
        self.at_once, self.number = at_once, min(cores(), at_once) if on_cpu else at_once
        tried = [FEW, at_once] if not on_cpu and at_once > FEW and has_lock() else []
        self.times: dict[int, list[tuple[float, float]]] = {number: [] for number in tried}
        self.calls, self.shortest = 0, 0.0  # seconds of the host; 0: no call has ended

    def note(self, number: int, by_devices: float, by_host: float) -> None:
        """Adds the seconds of a call. ``by_devices`` is 0 where events carry no times."""
        if (times := self.times) and number in times:
            times[number].append((by_devices, by_host))
            if min(map(len, times.values())) >= SAMPLES:
                has_times = all(pair[0] > 0 for pairs in times.values() for pair in pairs)
                few, every = (median(pair[not has_times] for pair in pairs) for pairs in times.values())
                in_doubt = not has_times and max(few, every) < DOUBT * min(few, every)
                better = FEW if few <= every else self.at_once
                self.number, self.times = min(cores(), self.at_once) if in_doubt else better, {}


class CallPermits(NamedTuple):
    """One call: ``number`` replicas run at a time, until none has ended for ``stall_timeout`` seconds."""

    number: int
    stall_timeout: float | None
    kind: _Kind
    turn: int
    streams: Mapping[Any, torch.Stream]
    before: Marks | None  # marks before its kernels, if it is measured
    start: float


class Permits:
    """How many replicas run at a time, for one form. ``largest``: how many could run at a time in any call so far."""

    def __init__(self) -> None:
        self.largest, self._kinds, self._training = 1, dict[Hashable, _Kind](), object()
        self._unread: tuple[CallPermits, Marks, float] | None = None  # of a call that devices may still compute
        self._begun = self._ended = 0  # numbers of calls

    def __reduce__(self) -> tuple[Any, ...]:
        return Permits, ()  # a copy knows nothing

    def begin_call(
        self,
        kind: Hashable,
        training: object,
        at_once: int,
        streams: Mapping[Any, torch.Stream],
        compiles: bool = False,
    ) -> CallPermits:
        """Begins a call in which ``at_once`` replicas can run. If it ends well, `end_call` has to follow.

        ``kind``: method and modes. When ``training``, the module's mode, changes, all is forgotten. ``streams``: the
        current ones of accelerators; none for CPU slots. If it ``compiles``, the first call of a kind has one permit.
        """
        if training != self._training or len(self._kinds) > KINDS:
            self._training, self._kinds, self._unread = training, {}, None
        if (unread := self._unread) is not None and have_passed(unread[1]):
            (call, after, by_host), self._unread = unread, None
            call.kind.note(call.number, seconds_between(call.before or {}, after), by_host)
        self.largest, self._begun = max(self.largest, at_once), self._begun + 1
        known = self._kinds.get((kind, at_once)) or _Kind(at_once, on_cpu=not streams)
        self._kinds[kind, at_once], known.calls, times, before = known, known.calls + 1, known.times, None
        number = 1 if compiles and known.calls == 1 else known.number
        if times and known.calls > WARM_UP and self._unread is None and self._ended == self._begun - 1:
            number = min(times, key=lambda tried: len(times[tried]))
            before = marks_on(streams)
        patience = max(STALL_TIMEOUT, STALL_CALLS * known.shortest) if number < at_once else None
        return CallPermits(number, patience, known, self._begun, streams, before, time.perf_counter())

    def end_call(self, call: CallPermits, stalled: bool = False) -> None:
        """Notes that a call has ended well. No device is waited for: a later call reads their times."""
        seconds, known, self._ended = time.perf_counter() - call.start, call.kind, call.turn
        if stalled and known.shortest > 0.0:
            known.number, known.times = known.at_once, {}  # none takes several times as long as all did: they wait
        elif call.before is not None and not stalled and self._begun == call.turn:  # no other call has begun
            self._unread = call, marks_on(call.streams), seconds
        seconds -= (call.stall_timeout or 0.0) * stalled
        known.shortest = min(known.shortest or seconds, seconds)
