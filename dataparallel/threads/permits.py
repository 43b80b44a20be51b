"""How many replicas run Python at a time: chosen by measuring a wrapper's calls.

Launch-bound models are fastest with one permit or two, compute-bound ones with as many as there are cores or device
queues, and a model that waits inside ``forward`` needs one for each slot. So the first calls of each *situation*
(modes, size of the inputs) try the numbers 1, 2, 4, ... and the rest use the best one. Results do not depend on it.

``DataParallel`` holds a `PermitChooser`; ``parallel_apply`` asks it before each call, and tells it how long the call
took. This room runs nothing itself and knows neither threads nor gangs.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from torch import Tensor

from dataparallel.forks import in_forked_child
from dataparallel.structures import tensors_in

__all__ = ["PermitChooser", "Trial", "size_of"]

SITUATIONS = 64  # remembered by one wrapper, the most recently used ones
TENSORS, VALUES = 8, 64  # of a replica's inputs are looked at to tell the size
UNMEASURED = 2  # first calls of a situation: they make workspaces, and choose kernels

SAMPLES = 6  # of a number that may be the best
MAY_WIN = (1.8, 1.3, 1.1)  # after one sample, two, and more: a number that takes longer, in times of the best, is out
HOPELESS = 2.5  # numbers below one that takes this many times the best are not tried at first
TIE = 1.03  # within this the smaller number is chosen: it spares threads, and memory that is used at once

FIRST_CHECK, LAST_CHECK = 200, 10_000  # calls until a choice is looked at again: doubles from the one to the other

PATIENCE = 1.0  # seconds without a replica ending until those that wait for a permit get one
PATIENCE_TIMES = 5.0  # the same, in durations of a whole call


class Trial:
    """One call: with how many ``permits`` it runs, and whether its time has to be ``measured``.

    ``patience``: seconds without a replica ending until those that wait for a permit get one; ``None`` where none has
    to wait. Replicas that wait for each other would otherwise hang with fewer permits than slots.
    """

    __slots__ = ("__weakref__", "alone", "kind", "measured", "patience", "permits", "situation")

    def __init__(self, kind: Hashable, situation: _Situation, permits: int, measured: bool, alone: bool) -> None:
        self.kind, self.situation = kind, situation
        self.permits, self.measured, self.alone = permits, measured, alone
        self.patience = situation.patience() if permits < situation.ladder[-1] else None


_all: weakref.WeakSet[PermitChooser] = weakref.WeakSet()


class PermitChooser:
    """Chooses for one wrapper, whose calls may come from several threads.

    Calls that overlap are not counted: their time says nothing. Nor are failed ones. A copy, and what is unpickled,
    starts afresh.
    """

    def __init__(self) -> None:
        _all.add(self)
        self._lock = threading.Lock()
        self._situations: OrderedDict[Hashable, _Situation] = OrderedDict()
        self._choices: OrderedDict[Hashable, int] = OrderedDict()  # the last one for each kind of situation
        # Weak: a call that is interrupted just before it could end counts as running no longer than it exists.
        self._running: weakref.WeakSet[Trial] = weakref.WeakSet()
        self._wait_for_each_other: set[int] = set()  # numbers of replicas that once had to run at the same time

    def __reduce__(self) -> tuple[Any, ...]:
        return PermitChooser, ()

    def begin(self, kind: Hashable, size: Hashable, at_once: int) -> Trial:
        """How the next call runs. Every trial has to be ended.

        Args:
            kind: modes and the like: a choice says nothing about another kind.
            size: of the inputs; the choice for one size is where the search for another size of its kind begins.
            at_once: how many replicas can run at a time, at least 1.
        """
        with self._lock:
            kind = (kind, at_once)
            situation = self._situation(kind, size, at_once)
            alone = len(self._running) == 0
            if at_once in self._wait_for_each_other:
                trial = Trial(kind, situation, at_once, False, alone)
            else:
                number = situation.next_to_measure() if alone else None
                measured = number is not None
                trial = Trial(kind, situation, situation.number if number is None else number, measured, alone)
            for other in self._running:
                other.alone = False
            self._running.add(trial)
            return trial

    def end(self, trial: Trial, seconds: float | None, stalled: bool = False) -> None:
        """The call has ended: after ``seconds``, ``None`` where it failed. ``stalled``: its patience ran out."""
        with self._lock:
            self._running.discard(trial)
            situation = trial.situation
            if not trial.alone or seconds is None:
                return
            if stalled and situation.shortest < math.inf:
                # No replica takes many times as long as all of them have taken together: they wait for each other.
                self._wait_for_each_other.add(situation.ladder[-1])
            elif trial.measured and not stalled and situation.note(trial.permits, seconds):
                self._choices[trial.kind] = situation.number
                self._choices.move_to_end(trial.kind)
                if len(self._choices) > SITUATIONS:
                    self._choices.popitem(last=False)
            situation.shortest = min(situation.shortest, seconds)

    def _situation(self, kind: Hashable, size: Hashable, at_once: int) -> _Situation:
        situation = self._situations.get((kind, size))
        if situation is None:
            situation = self._situations[kind, size] = _Situation(_ladder(at_once), self._choices.get(kind))
            if len(self._situations) > SITUATIONS:
                self._situations.popitem(last=False)
        self._situations.move_to_end((kind, size))
        situation.calls += 1
        return situation


@in_forked_child
def _start_afresh_after_fork() -> None:
    """Another thread may have been in the middle of something when the process was forked."""
    for chooser in list(_all):
        chooser.__init__()  # type: ignore[misc]


class _Situation:
    """What has been measured for calls that are alike, and what follows from it.

    Of the times of one number the lower third counts: what else happens on a machine makes calls longer, never shorter.
    The shortest one would flatter the larger numbers, as threads that compete for Python take now less, now more.
    """

    def __init__(self, ladder: tuple[int, ...], start: int | None) -> None:
        self.ladder = ladder
        self.calls = 0
        self.shortest = math.inf  # seconds, of a call with any number
        self._start = start  # the choice of a similar situation, or the last one of this
        self._times: dict[int, list[float]] = {}
        self._is_decided = False
        self._check_after = FIRST_CHECK
        self._check_at = 0

    @property
    def number(self) -> int:
        """The best one as far as is known."""
        if self._is_decided and self._start is not None:
            return self._start
        if self._times:
            return self._best()
        return self.ladder[-1] if self._start is None else self._start

    def patience(self) -> float:
        return PATIENCE if self.shortest == math.inf else max(PATIENCE, PATIENCE_TIMES * self.shortest)

    def next_to_measure(self) -> int | None:
        """The number that this call has to measure, if any."""
        if self.calls <= UNMEASURED or (self._is_decided and self.calls < self._check_at):
            return None
        if self._is_decided:
            # The machine may have been busy, or the model may have changed: look again, around the choice.
            self._is_decided = False
            self._times.clear()
        return self._missing()

    def note(self, number: int, seconds: float) -> bool:
        """Adds what was measured; returns whether that decides."""
        self._times.setdefault(number, []).append(seconds)
        if self._missing() is not None:
            return False
        limit = TIE * self._time(self._best())
        self._start = min(number for number in self._times if self._time(number) <= limit)
        self._is_decided = True
        self._check_at = self.calls + self._check_after
        self._check_after = min(2 * self._check_after, LAST_CHECK)
        return True

    def _missing(self) -> int | None:
        """The number of which a sample is missing for a decision."""
        for number in self._to_try():
            if number not in self._times:
                return number
        # Alternating, so that a load that comes or goes meets all of them.
        return min(filter(self._may_win, self._times), key=lambda number: len(self._times[number]), default=None)

    def _to_try(self) -> Iterator[int]:
        if self._start is None:
            for number in reversed(self.ladder):
                yield number
                if number in self._times and self._time(number) > HOPELESS * self._time(self._best()):
                    return
        else:
            # Uphill from the start: the best so far and its neighbours.
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
        times = sorted(self._times[number])
        return times[(len(times) - 1) // 3]


@lru_cache
def _ladder(at_once: int) -> tuple[int, ...]:
    """The numbers to choose from where ``at_once`` replicas can run at a time, smallest first."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    powers = {2**exponent for exponent in range(at_once.bit_length())}
    return tuple(sorted(number for number in {*powers, cores, at_once} if number <= at_once))


def size_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    """What tells inputs from inputs of another size: dtypes and rounded sizes of their first tensors.

    Sizes are rounded to three binary digits, so that batches padded to many lengths are a few situations, in each of
    which a call takes about as long as another.
    """
    return tuple((tensor.dtype, _rounded(tensor)) for tensor in islice(_tensors([kwargs, args]), TENSORS))


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    """Tensors like those of `tensors_in`, in a fixed order; quickly, and not all: this is run at each call."""
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
