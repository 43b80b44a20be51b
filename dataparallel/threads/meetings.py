"""`Meeting` is a barrier: the replicas of one call wait for each other inside ``forward``. It moves no tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.replicas.compiled.compile_lock import compile_lock
from dataparallel.threads.pool import POLL_SECONDS, Turn

if TYPE_CHECKING:
    from dataparallel.threads.gang import Gang, SerialTasks

T = TypeVar("T")


class WokenUp(RuntimeError):
    """The error of a replica that waited for others, because another replica's error has ended the call."""


def is_wake_up(error: BaseException | None) -> bool:
    """True if ``error`` is a `WokenUp`, or was raised while a `WokenUp` was handled: another error ended the call."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, WokenUp):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


_current_place: ContextVar[MeetingPlace | None] = ContextVar("dataparallel_place", default=None)


def here() -> MeetingPlace | None:
    """Returns the place of the replica whose forward calls this; ``None`` outside of a parallel forward.

    A nested call on several slots has places of its own. A nested call on one slot has no replica, so its module has
    the place of the replica around it.
    """
    return _current_place.get()


class MeetingPlace:
    """One replica in the meeting of its call. ``thread`` is the id of the thread that runs ``forward``."""

    __slots__ = ("index", "meeting", "thread")

    def __init__(self, index: int, meeting: Meeting) -> None:
        self.index, self.meeting, self.thread = index, meeting, threading.get_ident()

    @property
    def count(self) -> int:
        return len(self.meeting.devices)

    def meet(self, request: Hashable, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Waits until every replica of the call has come with an equal ``request``. Returns this replica's result.

        The last replica that comes calls ``combine`` with the values of all replicas in slot order. ``combine`` returns
        one result for each replica. Error messages contain ``str(request)``.
        If requests differ, a replica has returned or failed, or the time limit has run out, this raises.
        """
        if threading.get_ident() != self.thread:
            raise RuntimeError(
                f"{request} of replica {self.index}: it has to be called by the thread that runs the replica's "
                f"forward, not by {threading.current_thread().name}"
            )
        if self.count == 1:  # ``combine`` still meets other machines
            (result,) = compile_lock.run_aside(combine, [value])
            return result
        return compile_lock.run_aside(self.meeting.meet, self.index, request, value, combine)


class _Visit:
    """A replica that waits at the meeting. ``result`` and ``error`` are written before ``turn`` is given."""

    __slots__ = ("error", "is_over", "request", "result", "turn", "value")

    def __init__(self, request: Hashable, value: Any) -> None:
        self.request, self.value = request, value
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = False
        self.turn: Turn | None = None


class Meeting:
    """The meeting of one call with a replica on each of ``devices``. Who waits for whom, and what wakes whom:

    - A replica that comes waits until all replicas have come. The last replica combines the values of all, without a
      lock, and wakes the others.
    - A replica that waits has no permit, and other replicas of its group may run. So replicas that take turns meet too.
    - A replica that raises an error wakes those that wait. They raise `WokenUp`, and so does a replica that comes
      afterwards. `WokenUp` is never reported in place of the first error. Ctrl-C wakes those that wait too.
    - When every replica has come or has returned, their requests are compared. If requests differ, if a replica has
      returned, or after a time limit, all that wait raise an error that says who waits for what, and who has not come.

    Attributes:
        machines: a ``machines.peer_rounds.PeerCall`` if the form of the call spans machines.
        scheduler: runs the replicas; set before the first of them starts.
        is_serial: the user asks for replicas in the calling thread.
        records: true if each ``forward`` begins with gradients on.
        hooks: the saved-tensor hooks with which each ``forward`` begins, if there are any.

    ``_visits`` has the replicas that wait, ``_is_combining`` is true from when the last one comes until it wakes the
    others, ``_returned`` has the replicas whose forward has ended, and ``_failure`` is the reason why no replica may
    wait any more. Each is written with ``_lock`` held.
    """

    __slots__ = ("_failure", "_is_combining", "_lock", "_returned", "_visits", "devices", "hooks", "is_serial",
                 "machines", "records", "scheduler")  # fmt: skip

    def __init__(self, devices: Sequence[torch.device], machines: Any = None, is_serial: bool = False) -> None:
        self.devices = tuple(devices)
        self.machines, self.is_serial = machines, is_serial
        self.scheduler: Gang | SerialTasks | None = None
        self.records = torch.is_grad_enabled()
        self.hooks = _torch.top_saved_tensors_hooks(True)
        self._lock = threading.Lock()
        self._visits: dict[int, _Visit] = {}
        self._is_combining = False
        self._returned: set[int] = set()
        self._failure: str | None = None

    def run_replica(self, index: int, task: Callable[[], T]) -> T:
        token = _current_place.set(MeetingPlace(index, self))
        try:
            result = task()
        except BaseException as error:
            self._note_returned(index, f"replica {index} raised {type(error).__name__}")
            raise
        finally:
            _current_place.reset(token)
        self._note_returned(index, None)
        return result

    def meet(self, index: int, request: Hashable, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        visit = _Visit(request, value)
        with self._lock:
            if self._failure is not None:
                raise WokenUp(f"{request}: {self._failure}")
            if index in self._returned:
                raise RuntimeError(f"{request} of replica {index}: its forward has returned already")
            self._visits[index] = visit
            have_all_come = len(self._visits) == len(self.devices)
            is_decided = len(self._visits) + len(self._returned) == len(self.devices)
            are_equal = have_all_come and all(other.request == request for other in self._visits.values())
            self._is_combining = are_equal
            values = [self._visits[slot].value for slot in range(len(self.devices))] if are_equal else []
        if are_equal:
            self._combine(index, values, combine)
        elif have_all_come or is_decided:
            self._fail_waiting("the replicas do not wait for the same")
        try:
            self._wait(index, visit, is_last=are_equal)
        finally:
            visit.value = None
        if visit.error is not None:
            try:
                raise visit.error
            finally:
                visit.error = None  # otherwise the error would hold this frame, and the frame the error
        return visit.result

    def _combine(self, index: int, values: list[Any], combine: Callable[[list[Any]], Sequence[Any]]) -> None:
        try:
            results = combine(values)
            if len(results) != len(values):
                raise RuntimeError(f"{len(values)} replicas have met, but there are {len(results)} results")
        except BaseException as error:
            with self._lock:
                self._visits.pop(index, None)
                self._is_combining = False
            self._note_returned(index, f"replica {index}, which came last, raised {type(error).__name__}")
            raise
        for slot, visit in list(self._visits.items()):
            visit.result = results[slot]

    def _wait(self, index: int, visit: _Visit, is_last: bool) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        turn = self._park_last(index, scheduler) if is_last else scheduler.park(index)
        with self._lock:
            visit.turn = turn
            # Another thread has woken this replica before its turn was known. (The last replica has unparked itself.)
            is_late = visit.is_over and not is_last
        if is_late:
            scheduler.unpark([index])
        limit, polls = _chosen_limit, 0
        try:
            while not turn.wait(POLL_SECONDS):
                # Polls are counted instead of seconds, because time in which the whole process was stopped must not
                # count. Nor must time in which a thread compiles, or in which this replica waits for its permit.
                polls += not (visit.is_over or compile_lock.is_taken)
                if polls * POLL_SECONDS >= limit and not self._is_combining:
                    self._fail_waiting(f"not every replica has come within {limit:g} seconds")
        finally:
            with self._lock:
                self._visits.pop(index, None)
        if not visit.is_over:  # the scheduler has given the turn because the call fails
            visit.error = WokenUp(f"{visit.request}: the call has been interrupted, or a replica could not run")

    def _park_last(self, index: int, scheduler: Gang | SerialTasks) -> Turn:
        """Parks the last replica too, and unparks all, so that all go on in slot order.

        The lock is held until all are unparked. Otherwise a replica that only now looks at `is_over` could go on before
        lower slots of its group, and come to the next meeting before this one has ended.
        """
        with self._lock:
            visits, self._visits, self._is_combining = self._visits, {}, False
            for visit in visits.values():
                visit.is_over = True
            return scheduler.park(index, [*visits, index])

    def _note_returned(self, index: int, failure: str | None) -> None:
        with self._lock:
            self._returned.add(index)
            if failure is not None and self._failure is None:
                self._failure = failure
            is_decided = bool(self._visits) and len(self._visits) + len(self._returned) == len(self.devices)
        if failure is not None:
            self._wake(failure, reporting=None)
        elif is_decided:
            self._fail_waiting("some replicas have returned")

    def _fail_waiting(self, reason: str) -> None:
        """Makes all that wait raise an error. The call reports the error of the lowest slot."""
        with self._lock:
            reporting = min(self._visits, default=None)
            if reporting is None or self._is_combining:  # all have come just before the time limit
                return
            lines = [f"  replica {slot} on {device} {self._state_of(slot)}" for slot, device in enumerate(self.devices)]
            sentence = "\n".join([f"{reason}, so nobody can go on:", *lines])
            self._failure = self._failure or sentence
        self._wake(sentence, reporting)

    def _state_of(self, slot: int) -> str:
        if slot in self._visits:
            return f"waits for {self._visits[slot].request}"
        return "has returned from forward" if slot in self._returned else "has not come"

    def _wake(self, sentence: str, reporting: int | None) -> None:
        """Ends all visits with errors: a `RuntimeError` for the slot ``reporting``, `WokenUp` for the others."""
        with self._lock:
            visits, self._visits = self._visits, {}
            for slot, visit in visits.items():
                kind = RuntimeError if slot == reporting else WokenUp
                visit.error, visit.is_over = kind(f"{visit.request}: {sentence}"), True
            parked = [slot for slot, visit in visits.items() if visit.turn is not None]
        if parked and self.scheduler is not None:
            self.scheduler.unpark(parked)


_DEFAULT_LIMIT = 600.0  # seconds
_chosen_limit = _DEFAULT_LIMIT


def set_time_limit(seconds: float | None) -> None:
    """Sets how long replicas of this process wait for each other. ``None``: 10 minutes, as at the beginning.

    Raises:
        TypeError: ``seconds`` is no number.
        ValueError: ``seconds`` is not above 0.
    """
    global _chosen_limit
    seconds = checked("seconds", seconds, float, None, above=0)
    _chosen_limit = _DEFAULT_LIMIT if seconds is None else seconds
