"""`PermitChooser` chooses how many replicas run Python at a time, by timing a form's calls.

Launch-bound models are fastest with one or two permits if Python has a lock, and with as many as there are cores if it
has none. Compute-bound models want as many as there are cores or device queues. A model that waits inside ``forward``
needs one permit for each slot. So the first calls of each *situation* try the numbers of ``permit_numbers``, and later
calls use the best number. Results of the model do not depend on the number.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.batches.structures import tensors_in
from dataparallel.comm.streams.current import DeviceClock, Marks
from dataparallel.devices import CPU
from dataparallel.threads.permit_numbers import Numbers, numbers_for
from dataparallel.threads.situations import Chooser, ChoosingCall, Situation, lower_third

TENSORS, VALUES = 8, 64  # the size of a call comes from so many tensors, among so many of a replica's inputs

SAMPLES = 6  # a number that may be the best is measured so many times
MAY_WIN = (1.8, 1.3, 1.1)  # after 1, 2 and more samples, a number is out if its time is more than this times the best
HOPELESS = 2.5  # if a number takes this many times as long as the best, the first search goes no further that way
TIE = 1.03  # numbers with times within this ratio are equally good

FIRST_CHECK = 200  # a choice is checked the first time after so many calls

STALL_TIMEOUT = 1.0  # if no replica ends for so many seconds, and so many durations of a whole call, a call has stalled
STALL_CALLS = 5.0


class TimesInTurn(NamedTuple):
    """Seconds of the host, and of the slowest device, in a call whose replicas ran one after the other."""

    host: float
    devices: float


class CallPermits(ChoosingCall):
    """The number of ``permits`` of one call. If ``is_measured``, `PermitChooser.end_call` needs the call's time.

    ``stall_timeout``: if no replica ends for so many seconds, replicas need no permits any more. Otherwise replicas
    that wait for each other would hang. ``None`` if there are enough permits for all.
    """

    __slots__ = ("host_seconds", "is_measured", "kind", "permits", "situation", "stall_timeout")

    def __init__(self, kind: Hashable, situation: _Situation) -> None:
        super().__init__()
        self.kind, self.situation = kind, situation
        self.permits, self.is_measured, self.host_seconds = situation.number, False, 0.0
        self.stall_timeout: float | None = None


class PermitChooser(Chooser["_Situation", int]):
    """Chooses how many replicas run at a time, for one form.

    On accelerators a call returns before its kernels have run. So a measured call puts marks on its streams before and
    after its kernels. A later call reads their times when the devices have passed the marks. Until then no other call
    of the situation is measured. The time begins when the devices have finished the kernels of earlier calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._need_all_permits: set[int] = set()  # numbers of replicas that had to run at the same time
        self.largest = 1  # the largest number of replicas that could run at a time
        self._unread: deque[tuple[CallPermits, Marks, Marks]] = deque()  # measured calls whose marks have to be read
        self.times_in_turn: deque[TimesInTurn] = deque(maxlen=SAMPLES)  # of the last calls that devices have timed
        self._clock = DeviceClock()

    def begin_call(self, kind: Hashable, size: Hashable, at_once: int, first_in_turn: bool = False) -> CallPermits:
        """Returns the permits of the next call. `end_call` has to follow.

        Args:
            kind: modes and similar things. A choice for one kind says nothing about another.
            size: the size of the inputs. The search for a new size begins at the last choice for its kind.
            at_once: how many replicas can run at a time, at least 1.
            first_in_turn: the first call of a situation has one permit, so that code is compiled by one replica only.
        """
        with self._lock:
            self.largest = max(self.largest, at_once)
            self._read_marks()
            kind = (kind, at_once)
            situation = self._situation(kind, size, lambda start: _Situation(numbers_for(at_once), start))
            call = CallPermits(kind, situation)
            self._note_begin(call)
            if at_once in self._need_all_permits:
                call.permits = at_once
            elif first_in_turn and situation.calls == 1:
                call.permits = 1
            elif call.is_alone and (number := situation.next_to_measure()) is not None:
                call.permits, call.is_measured = number, True
            if call.permits < at_once:
                call.stall_timeout = situation.stall_timeout()
            return call

    def marks(self, call: CallPermits, streams: Sequence[torch.Stream]) -> Marks:
        """Puts marks on the streams of a measured call. Called twice: before the replicas run, and after."""
        return self._clock.marks({stream: stream for stream in streams}) if call.is_measured else {}

    def end_call(
        self,
        call: CallPermits,
        seconds: float | None,
        stalled: bool = False,
        before: Marks | None = None,
        after: Marks | None = None,
    ) -> None:
        """Notes that the call has ended after ``seconds`` of the host, or failed (``None``), or ``stalled`` on its way.

        ``before`` and ``after`` are the call's `marks`. Without marks the seconds of the host are its time.
        """
        with self._lock:
            self._running.discard(call)
            situation = call.situation
            if not call.is_alone or seconds is None:
                return
            if stalled and situation.shortest < math.inf:
                # No replica takes several times as long as a whole call did, so replicas must wait for each other.
                self._need_all_permits.add(situation.numbers.ladder[-1])
            elif call.is_measured and not stalled and before and after:
                situation.has_unread_time, call.host_seconds = True, seconds
                self._unread.append((call, before, after))
            elif call.is_measured and not stalled:
                self._note(call, seconds)
            situation.shortest = min(situation.shortest, seconds)

    def _read_marks(self) -> None:
        """Notes the times of measured calls whose last marks the devices have passed. Needs the lock."""
        while self._unread and self._clock.have_passed(self._unread[0][2]):
            call, before, after = self._unread.popleft()
            call.situation.has_unread_time = False
            seconds = max(self._clock.seconds(before, after).values())
            self._note(call, seconds)
            if call.permits == 1:
                self.times_in_turn.append(TimesInTurn(call.host_seconds, seconds))

    def _note(self, call: CallPermits, seconds: float) -> None:
        if call.situation.note(call.permits, seconds):
            self._note_choice(call.kind, call.situation.number)


class _Situation(Situation):
    """The measured times of one situation for each number of permits, and the choice that follows from them."""

    def __init__(self, numbers: Numbers, start: int | None) -> None:
        super().__init__(FIRST_CHECK)
        self.numbers = numbers  # to choose from
        self.shortest = math.inf  # seconds of the host in the shortest call with any number
        self.has_unread_time = False  # a call has been measured, and its time has not been read
        self._start = start  # the choice for a similar situation, later the last choice for this situation
        self._times: dict[int, list[float]] = {}  # samples for each number
        self._is_decided = False

    @property
    def number(self) -> int:
        """The best number so far."""
        if self._is_decided and self._start is not None:
            return self._start
        if self._times:
            return self._best()
        return self.numbers.first if self._start is None else self._start

    def stall_timeout(self) -> float:
        return STALL_TIMEOUT if self.shortest == math.inf else max(STALL_TIMEOUT, STALL_CALLS * self.shortest)

    def next_to_measure(self) -> int | None:
        """Returns the number that this call has to measure, if any."""
        if self.has_unread_time or not self._is_time_to_measure:
            return None
        if self._is_decided:
            # The machine may have been busy, or the model may have changed: measure again, around the choice.
            self._is_decided = False
            self._times.clear()
        return self._next_number()

    def note(self, number: int, seconds: float) -> bool:
        """Adds a measured time. Returns ``True`` if the situation has its choice now."""
        self._times.setdefault(number, []).append(seconds)
        if self._next_number() is not None:
            return False
        limit = TIE * self._time(self._best())
        self._start = self.numbers.choice_among(number for number in self._times if self._time(number) <= limit)
        self._is_decided = True
        self._note_decision()
        return True

    def _next_number(self) -> int | None:
        """Returns the number that has to be measured next; ``None`` if a choice can be made."""
        for number in self._numbers_to_try():
            if number not in self._times:
                return number
        # Numbers alternate, so that other load on the machine affects all of them.
        return min(filter(self._may_win, self._times), key=lambda number: len(self._times[number]), default=None)

    def _numbers_to_try(self) -> Iterator[int]:
        if self._start is None:
            for direction in self.numbers.in_order_of_search():
                for number in direction:
                    yield number
                    if number in self._times and self._time(number) > HOPELESS * self._time(self._best()):
                        break
        else:
            # Hill climbing from the start: the best number so far, then its neighbours.
            ladder = self.numbers.ladder
            place = ladder.index(self._best() if self._times else self._start)
            yield ladder[place]
            yield from ladder[place + 1 : place + 2]
            yield from ladder[max(0, place - 1) : place]

    def _may_win(self, number: int) -> bool:
        samples = len(self._times[number])
        return samples < SAMPLES and self._time(number) <= MAY_WIN[min(samples, 3) - 1] * self._time(self._best())

    def _best(self) -> int:
        return min(self._times, key=self._time)

    def _time(self, number: int) -> float:
        return lower_third(self._times[number])


def kind_of_call(module: Any, slots: Sequence[torch.device]) -> Hashable:
    """Returns a key. Calls with equal keys and inputs of equal size share a choice of permits."""
    return (
        len(slots),
        getattr(module, "training", None),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _torch.is_any_autocast_enabled(),
        torch.get_num_threads() if slots[0] == CPU else None,
    )


def size_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    """Returns the size of inputs as a key: dtypes and rounded sizes of the first tensors.

    Sizes are rounded to three binary digits. So batches that are padded to many lengths make few situations, and calls
    of one situation take about the same time.
    """
    return tuple((tensor.dtype, _rounded(tensor)) for tensor in islice(_tensors([kwargs, args]), TENSORS))


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    """Yields the first tensors in ``values``, in a fixed order. It runs at each call, faster than `tensors_in`."""
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
