"""How many replicas run Python at a time: chosen by timing a form's calls.

Launch-bound models are fastest with one or two permits, compute-bound models with as many as there are cores or device
queues. A model that waits inside ``forward`` needs one permit for each slot. So the first calls of each *situation* try
the numbers 1, 2, 4, ..., and later calls use the best one. Results do not depend on it.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.batches.structures import tensors_in
from dataparallel.comm.streams.current import DeviceClock, Marks
from dataparallel.devices import CPU
from dataparallel.threads.situations import Chooser, ChoosingCall, Situation, lower_third

TENSORS, VALUES = 8, 64  # how many of a replica's inputs tell the size

SAMPLES = 6  # how many times a number is measured that may be the best
MAY_WIN = (1.8, 1.3, 1.1)  # a number that takes longer than this times the best is out, after 1, 2 and more samples
HOPELESS = 2.5  # if a number takes this many times as long as the best, smaller numbers are not tried at first
TIE = 1.03  # of times within this ratio the smallest number is chosen: it needs fewer threads and less memory at once

FIRST_CHECK = 200  # calls until a choice is checked the first time

STALL_TIMEOUT = 1.0  # seconds without a replica ending until waiting replicas need no permit, at least
STALL_CALLS = 5.0  # the same in durations of a whole call


class CallPermits(ChoosingCall):
    """The number of ``permits`` of one call. Its time has to be measured if ``measured`` is true.

    ``stall_timeout``: after so many seconds without a replica ending, waiting replicas need no permit; ``None`` if no
    replica has to wait for one. Otherwise replicas that wait for each other would hang.
    """

    __slots__ = ("kind", "measured", "permits", "situation", "stall_timeout")

    def __init__(self, kind: Hashable, situation: _Situation) -> None:
        super().__init__()
        self.kind, self.situation = kind, situation
        self.permits, self.measured = situation.number, False
        self.stall_timeout: float | None = None


class PermitChooser(Chooser["_Situation", int]):
    """Chooses how many replicas run at a time, for one form.

    On accelerators a call returns before its kernels have run. So a call that is measured is enclosed by marks on its
    streams, whose times are read in a later call, when the devices have come to them. Until then nothing else of its
    situation is measured. Time begins when the devices have done what came before: a host that is ahead costs nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wait_for_each_other: set[int] = set()  # numbers of replicas that had to run at the same time
        self.largest = 1  # the largest number of replicas that could run at a time
        self._late: deque[tuple[CallPermits, Marks, Marks]] = deque()  # measured calls whose times have to be read
        self._clock = DeviceClock()

    def begin_call(
        self, kind: Hashable, size: Hashable, at_once: int, first_in_turn: bool = False, fixed: bool = False
    ) -> CallPermits:
        """The permits of the next call. `end_call` has to follow.

        Args:
            kind: modes and similar things. A choice for one kind says nothing about another.
            size: the size of the inputs. The search for a new size begins at the last choice for its kind.
            at_once: how many replicas can run at a time, at least 1.
            first_in_turn: the first call of a situation has one permit. So what it compiles is compiled once.
            fixed: the call has the best number found so far and is not measured, because something else is.
        """
        with self._lock:
            self.largest = max(self.largest, at_once)
            self._read_late()
            kind = (kind, at_once)
            situation = self._situation(kind, size, lambda start: _Situation(_ladder(at_once), start))
            call = CallPermits(kind, situation)
            self._note_begin(call)
            if at_once in self._wait_for_each_other:
                call.permits = at_once
            elif first_in_turn and situation.calls == 1:
                call.permits = 1
            elif call.alone and not fixed and (number := situation.next_to_measure()) is not None:
                call.permits, call.measured = number, True
            if call.permits < at_once:
                call.stall_timeout = situation.stall_timeout()
            return call

    def marks(self, call: CallPermits, streams: Sequence[torch.Stream]) -> Marks:
        """Marks on the streams of a call, if it is measured. There are two: before the replicas run, and after."""
        return self._clock.marks({stream: stream for stream in streams}) if call.measured else {}

    def end_call(
        self,
        call: CallPermits,
        seconds: float | None,
        stalled: bool = False,
        before: Marks | None = None,
        after: Marks | None = None,
    ) -> None:
        """Notes that the call has ended after ``seconds`` of the host, or failed (``None``), or ``stalled`` on its way.

        ``before`` and ``after`` are its `marks`. Without them the seconds of the host are its time.
        """
        with self._lock:
            self._running.discard(call)
            situation = call.situation
            if not call.alone or seconds is None:
                return
            if stalled and situation.shortest < math.inf:
                # No replica takes several times as long as a whole call did, so replicas must wait for each other.
                self._wait_for_each_other.add(situation.ladder[-1])
            elif call.measured and not stalled and before and after:
                situation.is_late = True
                self._late.append((call, before, after))
            elif call.measured and not stalled:
                self._note(call, seconds)
            situation.shortest = min(situation.shortest, seconds)

    def _read_late(self) -> None:
        """Notes the times of measured calls to whose ends the devices have come. Needs the lock."""
        while self._late and self._clock.have_passed(self._late[0][2]):
            call, before, after = self._late.popleft()
            call.situation.is_late = False
            self._note(call, max(self._clock.seconds(before, after).values()))

    def _note(self, call: CallPermits, seconds: float) -> None:
        if call.situation.note(call.permits, seconds):
            self._note_choice(call.kind, call.situation.number)


class _Situation(Situation):
    """The times of calls that are alike, and the choice that follows from them."""

    def __init__(self, ladder: tuple[int, ...], start: int | None) -> None:
        super().__init__(FIRST_CHECK)
        self.ladder = ladder
        self.shortest = math.inf  # seconds of the host in the shortest call with any number
        self.is_late = False  # a call has been measured, and its time has not been read
        self._start = start  # the choice for a similar situation, later the last one for this
        self._times: dict[int, list[float]] = {}
        self._is_decided = False

    @property
    def number(self) -> int:
        """The best number found so far."""
        if self._is_decided and self._start is not None:
            return self._start
        if self._times:
            return self._best()
        return self.ladder[-1] if self._start is None else self._start

    def stall_timeout(self) -> float:
        return STALL_TIMEOUT if self.shortest == math.inf else max(STALL_TIMEOUT, STALL_CALLS * self.shortest)

    def next_to_measure(self) -> int | None:
        """The number that this call measures, if any."""
        if self.is_late or not self._is_time_to_measure:
            return None
        if self._is_decided:
            # The machine may have been busy, or the model may have changed: measure again, around the choice.
            self._is_decided = False
            self._times.clear()
        return self._missing()

    def note(self, number: int, seconds: float) -> bool:
        """Adds a measured time. Returns ``True`` if that decides the choice."""
        self._times.setdefault(number, []).append(seconds)
        if self._missing() is not None:
            return False
        limit = TIE * self._time(self._best())
        self._start = min(number for number in self._times if self._time(number) <= limit)
        self._is_decided = True
        self._note_decision()
        return True

    def _missing(self) -> int | None:
        """The number that has to be measured next before a decision, if any."""
        for number in self._to_try():
            if number not in self._times:
                return number
        # Alternating, so that a load that comes or goes affects all numbers.
        return min(filter(self._may_win, self._times), key=lambda number: len(self._times[number]), default=None)

    def _to_try(self) -> Iterator[int]:
        if self._start is None:
            for number in reversed(self.ladder):
                yield number
                if number in self._times and self._time(number) > HOPELESS * self._time(self._best()):
                    return
        else:
            # Hill climbing from the start: the best number so far and its neighbours.
            place = self.ladder.index(self._best() if self._times else self._start)
            yield self.ladder[place]
            yield from self.ladder[place + 1 : place + 2]
            yield from self.ladder[max(0, place - 1) : place]

    def _may_win(self, number: int) -> bool:
        samples = len(self._times[number])
        return samples < SAMPLES and self._time(number) <= MAY_WIN[min(samples, 3) - 1] * self._time(self._best())

    def _best(self) -> int:
        return min(self._times, key=self._time)

    def _time(self, number: int) -> float:
        return lower_third(self._times[number])


@lru_cache
def _ladder(at_once: int) -> tuple[int, ...]:
    """The numbers to choose from if ``at_once`` replicas can run at a time, smallest first."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    powers = {2**exponent for exponent in range(at_once.bit_length())}
    return tuple(sorted(number for number in {*powers, cores, at_once} if number <= at_once))


def kind_of_call(module: Any, slots: Sequence[torch.device]) -> Hashable:
    """A key for calls that share a choice of permits, if their inputs have the same size."""
    return (
        len(slots),
        getattr(module, "training", None),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _torch.is_any_autocast_enabled(),
        torch.get_num_threads() if slots[0] == CPU else None,
    )


def size_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    """The size of inputs as a key: dtypes and rounded sizes of their first tensors.

    Sizes are rounded to three binary digits. So batches padded to many lengths are a few situations, and the calls of
    one situation take about as long as each other.
    """
    return tuple((tensor.dtype, _rounded(tensor)) for tensor in islice(_tensors([kwargs, args]), TENSORS))


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    """The first tensors in ``values``, in a fixed order. Faster than `tensors_in`, because it runs at each call."""
    for _ in range(VALUES):
        if not values:
            return
        value = values.pop()
        if type(value) is Tensor:
            yield value
        elif type(value) is dict:
            values.extend(value.values())
        elif type(value) in (tuple, list):
            values.extend(value)
        elif not isinstance(value, (int, float, str, type(None))):
            yield from tensors_in(value)


def _rounded(tensor: Tensor) -> int:
    if tensor.is_nested:
        return -1
    count = tensor.numel()
    digits = max(0, count.bit_length() - 3)
    return count >> digits << digits
