"""A *meeting*: where the replicas of one call wait for each other inside ``forward``. No tensors move here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch

from dataparallel import _torch
from dataparallel.replicas.compiled.gate import gate
from dataparallel.threads.pool import POLL_SECONDS, Turn
from dataparallel.threads.slot_costs import waiting

T = TypeVar("T")

LIMIT_VARIABLE = "DATAPARALLEL_PEERS_TIMEOUT"
"""Environment variable: how many seconds a replica waits for the others at most."""

_DEFAULT_LIMIT = 600.0  # seconds


class WokenUp(RuntimeError):
    """The error of a replica that waited for others, because another replica's error has ended the call."""


def is_wake_up(error: BaseException | None) -> bool:
    """True if ``error`` is a `WokenUp`, or was raised while one was handled. Then another error has ended the call."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, WokenUp):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


class Turns(Protocol):
    """What runs the replicas of a call, and knows their permits: a `Gang`, or `in_turn.SerialTasks`."""

    def step_aside(self, slot: int, go_on: Sequence[int] = ()) -> Turn:
        """Called by the thread of ``slot``, which begins to wait without a permit and without its group's turn.

        Slots in ``go_on`` have done so, or are ``slot`` itself. They get their turns from now on, in slot order.
        """

    def let_go_on(self, slots: Sequence[int]) -> None:
        """Slots that have stepped aside get their turns from now on, in slot order. Any thread may call it."""


_here: ContextVar[Place | None] = ContextVar("dataparallel_place", default=None)


def here() -> Place | None:
    """The place of the replica that runs here; ``None`` outside of a parallel forward.

    A nested call on several slots has places of its own. On one slot it has no replica, so its module is at the place
    of the replica around it.
    """
    return _here.get()


class Place:
    """Where one replica of a call stands.

    Attributes:
        index: the replica's number, in slot order.
        meeting: of the call.
        thread: the thread that runs ``forward``.
    """

    __slots__ = ("index", "meeting", "thread")

    def __init__(self, index: int, meeting: Meeting) -> None:
        self.index, self.meeting, self.thread = index, meeting, threading.get_ident()

    @property
    def count(self) -> int:
        """How many replicas the call has."""
        return len(self.meeting.devices)

    def meet(self, what: Hashable, value: Any, together: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Waits until every replica of the call has come with an equal ``what``, and returns this replica's result.

        The last replica that comes calls ``together`` with the values of all in slot order. It returns one result for
        each replica. ``str(what)`` stands in error messages.

        Raises:
            RuntimeError: replicas came for different things, one has returned, or the time limit has run out; another
                replica has failed (`WokenUp`); this is not the thread that runs ``forward``.
            Exception: ``together`` raised it, in this thread.
        """
        if threading.get_ident() != self.thread:
            raise RuntimeError(
                f"{what} of replica {self.index}: it has to be called by the thread that runs the replica's forward, "
                f"not by {threading.current_thread().name}"
            )
        if self.count == 1:  # it is here to meet other machines
            (result,) = gate.run_aside(together, [value])
            return result
        return gate.run_aside(self.meeting.meet, self.index, what, value, together)


class _Visit:
    """One replica at one meeting. ``result`` and ``error`` are written before its turn is given."""

    __slots__ = ("error", "is_over", "result", "turn", "value", "what")

    def __init__(self, what: Hashable, value: Any) -> None:
        self.what, self.value = what, value
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = False
        self.turn: Turn | None = None


class Meeting:
    """The meeting of one call with a replica on each of ``devices``. Who waits for whom, and what wakes whom:

    - A replica that comes waits until all replicas have come. The last one does what they came for, without a lock, and
      wakes the others.
    - Who waits has no permit, and other replicas of its group may run. So replicas that take turns meet too.
    - A replica that raises an error wakes those that wait. They raise `WokenUp`, which is never reported in place of
      that error. So does a replica that comes afterwards. Ctrl-C wakes those that wait too.
    - Once every replica has come or has returned, it is certain whether they agree. If they do not, or if one has
      returned, or after a time limit, all that wait raise an error that says who waits for what, and who has not come.

    Attributes:
        machines: a ``machines.peer_rounds.PeerCall`` if the form of the call spans machines.
        turns: what runs the replicas; set before the first of them starts.
        is_serial: all replicas run in the calling thread, so one that waits for another waits in vain.
        records: true if each ``forward`` begins with gradients on.
        hooks: the saved-tensor hooks with which each ``forward`` begins, if there are any.

    ``_visits`` has the replicas that wait, ``_is_complete`` is true while the last one does what all have come for,
    ``_returned`` has the replicas whose forward has ended, and ``_failed`` is the reason why nobody may wait any more.
    Each is written with ``_lock`` held.
    """

    __slots__ = ("_failed", "_is_complete", "_lock", "_returned", "_visits", "devices", "hooks", "is_serial",
                 "machines", "records", "turns")  # fmt: skip

    def __init__(self, devices: Sequence[torch.device], machines: Any = None, is_serial: bool = False) -> None:
        self.devices = tuple(devices)
        self.machines, self.is_serial = machines, is_serial
        self.turns: Turns | None = None
        self.records = torch.is_grad_enabled()
        self.hooks = _torch.top_saved_tensors_hooks(True)
        self._lock = threading.Lock()
        self._visits: dict[int, _Visit] = {}
        self._is_complete = False
        self._returned: set[int] = set()
        self._failed: str | None = None

    def run_replica(self, index: int, task: Callable[[], T]) -> T:
        """Runs the replica's ``task`` at its place."""
        token = _here.set(Place(index, self))
        try:
            result = task()
        except BaseException as error:
            self._end(index, f"replica {index} raised {type(error).__name__}")
            raise
        finally:
            _here.reset(token)
        self._end(index, None)
        return result

    def meet(self, index: int, what: Hashable, value: Any, together: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """See `Place.meet`."""
        visit = _Visit(what, value)
        with self._lock:
            if self._failed is not None:
                raise WokenUp(f"{what}: {self._failed}")
            if index in self._returned:
                raise RuntimeError(f"{what} of replica {index}: its forward has returned already")
            self._visits[index] = visit
            is_last = len(self._visits) == len(self.devices)
            certain = len(self._visits) + len(self._returned) == len(self.devices)
            wrong = certain and (not is_last or any(other.what != what for other in self._visits.values()))
            self._is_complete = is_last and not wrong
            values = [self._visits[slot].value for slot in range(len(self.devices))] if self._is_complete else []
        if wrong:
            self._give_up("the replicas do not wait for the same")
        elif is_last:
            self._do(index, values, together)
        try:
            with waiting():
                self._wait(index, visit, is_last and not wrong)
        finally:
            visit.value = None
        if visit.error is not None:
            try:
                raise visit.error
            finally:
                visit.error = None  # otherwise the error would hold this frame, and the frame the error
        return visit.result

    def _do(self, index: int, values: list[Any], together: Callable[[list[Any]], Sequence[Any]]) -> None:
        """Does what all have come for, in the thread of the last one."""
        try:
            results = together(values)
            if len(results) != len(values):
                raise RuntimeError(f"{len(values)} replicas have met, but there are {len(results)} results")
        except BaseException as error:
            with self._lock:
                self._visits.pop(index, None)
                self._is_complete = False
            self._end(index, f"replica {index}, which came last, raised {type(error).__name__}")
            raise
        for slot, visit in list(self._visits.items()):
            visit.result = results[slot]

    def _wait(self, index: int, visit: _Visit, is_last: bool) -> None:
        turns = self.turns
        assert turns is not None
        if is_last:
            turn = self._step_aside_last(index, turns)
        else:
            turn = turns.step_aside(index)
        with self._lock:
            visit.turn = turn
            # It was woken between the two, and nobody knew its turn. (The last one woke itself.)
            is_late = visit.is_over and not is_last
        if is_late:
            turns.let_go_on([index])
        limit, polls = _limit(), 0
        try:
            while not turn.wait(POLL_SECONDS):
                # Polls are counted, not seconds, because time in which the whole process was stopped does not count.
                # Nor does time in which somebody compiles, or in which this replica waits for its permit.
                polls += not (visit.is_over or gate.is_taken)
                if polls * POLL_SECONDS >= limit and not self._is_complete:
                    self._give_up(f"not every replica has come within {limit:g} seconds")
        finally:
            with self._lock:
                self._visits.pop(index, None)
        if not visit.is_over:  # not everybody has come, and the turn is for going home
            visit.error = WokenUp(f"{visit.what}: the call has been interrupted, or a replica could not run")

    def _step_aside_last(self, index: int, turns: Turns) -> Turn:
        """The last one steps aside as well. So all of them go on in slot order.

        The lock is held until they have their turns: a replica that looks only now if it is over would otherwise go on
        before lower slots of its group, and could come to the next meeting before this one has ended.
        """
        with self._lock:
            visits, self._visits, self._is_complete = self._visits, {}, False
            for visit in visits.values():
                visit.is_over = True
            return turns.step_aside(index, [*visits, index])

    def _end(self, index: int, failure: str | None) -> None:
        with self._lock:
            self._returned.add(index)
            if failure is not None and self._failed is None:
                self._failed = failure
            certain = bool(self._visits) and len(self._visits) + len(self._returned) == len(self.devices)
        if failure is not None:
            self._wake(failure, blamed=None)
        elif certain:
            self._give_up("some replicas have returned")

    def _give_up(self, reason: str) -> None:
        """All that wait raise an error. That of the first one in slot order is the one that the call reports."""
        with self._lock:
            blamed = min(self._visits, default=None)
            if blamed is None or self._is_complete:  # it was about time: all have come
                return
            lines = [f"  replica {slot} on {device} {self._does(slot)}" for slot, device in enumerate(self.devices)]
            sentence = "\n".join([f"{reason}, so nobody can go on:", *lines])
            self._failed = self._failed or sentence
        self._wake(sentence, blamed)

    def _does(self, slot: int) -> str:
        if slot in self._visits:
            return f"waits for {self._visits[slot].what}"
        return "has returned from forward" if slot in self._returned else "has not come"

    def _wake(self, sentence: str, blamed: int | None) -> None:
        with self._lock:
            visits, self._visits = self._visits, {}
            for slot, visit in visits.items():
                kind = RuntimeError if slot == blamed else WokenUp
                visit.error, visit.is_over = kind(f"{visit.what}: {sentence}"), True
            aside = [slot for slot, visit in visits.items() if visit.turn is not None]
        if aside and self.turns is not None:
            self.turns.let_go_on(aside)


_chosen_limit: float | None = None


def set_time_limit(seconds: float | None) -> None:
    """How long a replica waits for the others, in this process; ``None``: as the environment says, or 10 minutes.

    Raises:
        ValueError: ``seconds`` is not above 0.
    """
    global _chosen_limit
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds={seconds!r}: replicas can wait for each other for more than 0 seconds only")
    _chosen_limit = seconds


def _limit() -> float:
    if _chosen_limit is not None:
        return _chosen_limit
    given = os.environ.get(LIMIT_VARIABLE)
    if not given:
        return _DEFAULT_LIMIT
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{LIMIT_VARIABLE}={given!r} in the environment: expected a number of seconds above 0")
    return seconds
