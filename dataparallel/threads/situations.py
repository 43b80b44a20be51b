"""`Chooser` learns from the calls of a form, by situation: calls with the same modes and the same size of inputs.

``permits`` uses it to choose how many replicas run at a time, and ``balance`` to choose how a batch is split. Both time
the first calls of each situation, choose, and check the choice later, at longer and longer intervals.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from dataparallel.forks import in_forked_child
from dataparallel.weak_members import WeakMembers

SITUATIONS = 64  # a form remembers so many situations, the most recently used ones
UNMEASURED = 2  # the first calls of a situation allocate workspaces and choose kernels, so they are not measured
LAST_CHECK = 10_000  # calls between two checks of a choice, at most; the number doubles from check to check


class ChoosingCall:
    """A call for which a `Chooser` chooses. ``is_alone``: no other call of the form has run at the same time."""

    __slots__ = ("__weakref__", "is_alone")

    def __init__(self) -> None:
        self.is_alone = True


class Situation:
    """Counts the ``calls`` of one situation, and says when to measure. ``first_check``: calls until the first check."""

    def __init__(self, first_check: int) -> None:
        self.calls = 0
        self._check_after, self._check_at = first_check, UNMEASURED + 1

    @property
    def _is_time_to_measure(self) -> bool:
        return self.calls >= self._check_at

    def _note_decision(self) -> None:
        self._check_at = self.calls + self._check_after
        self._check_after = min(2 * self._check_after, LAST_CHECK)


S = TypeVar("S", bound=Situation)
C = TypeVar("C")

_all: WeakMembers[Chooser[Any, Any]] = WeakMembers()


class Chooser(Generic[S, C]):
    """Keeps the situations (type ``S``) and choices (type ``C``) of one form. Any thread may call the form.

    Calls that overlap and calls that fail are not measured: their times say nothing. A copy of a chooser, also an
    unpickled one, remembers nothing. Subclasses hold ``_lock`` around each use of the fields.
    """

    def __init__(self) -> None:
        _all.add(self)
        self._lock = threading.Lock()
        self._situations: OrderedDict[Hashable, S] = OrderedDict()
        self._choices: OrderedDict[Hashable, C] = OrderedDict()  # the last choice for each kind
        # Weak references, because Ctrl-C may skip the end of a call: a call that no longer exists does not run.
        self._running: WeakMembers[ChoosingCall] = WeakMembers()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def _situation(self, kind: Hashable, size: Hashable, make: Callable[[C | None], S]) -> S:
        """Returns the situation of a call that begins. ``make`` makes a new one from the last choice for its kind."""
        key = kind, size
        if key not in self._situations:
            _put(self._situations, key, make(self._choices.get(kind)))
        self._situations.move_to_end(key)
        self._situations[key].calls += 1
        return self._situations[key]

    def _note_begin(self, call: ChoosingCall) -> None:
        call.is_alone = not self._running
        for other in self._running:
            other.is_alone = False
        self._running.add(call)

    def _note_choice(self, kind: Hashable, choice: C) -> None:
        _put(self._choices, kind, choice)


def _put(recent: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    recent[key] = value
    recent.move_to_end(key)
    if len(recent) > SITUATIONS:
        recent.popitem(last=False)


def lower_third(times: Iterable[float]) -> float:
    """Returns the time at the end of the lowest third, because other load makes calls longer, never shorter.

    The shortest time would favour many threads, because the times of threads that compete for Python vary more.
    """
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 3]


@in_forked_child
def _start_afresh_after_fork() -> None:
    """Resets all choosers: at the fork another thread may have held a lock, or been about to change a chooser."""
    for chooser in _all:
        chooser.__init__()  # type: ignore[misc]
