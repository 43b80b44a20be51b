"""What a form's calls teach, by situation: calls of the same modes and the same size of inputs.

``permits`` chooses so how many replicas run at a time, and ``balance`` how a batch is split. Both measure the first
calls of each situation, choose, and check that later, after more and more calls. Nothing here runs or waits.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from dataparallel.forks import in_forked_child

SITUATIONS = 64  # how many situations a form remembers, the most recently used ones
UNMEASURED = 2  # first calls of a situation, which allocate workspaces and choose kernels
LAST_CHECK = 10_000  # calls until a choice is checked, at most; the number doubles from check to check


class ChoosingCall:
    """A call that is told what was chosen. It is ``alone`` until another call of its form runs at the same time."""

    __slots__ = ("__weakref__", "alone")

    def __init__(self) -> None:
        self.alone = True


class Situation:
    """The ``calls`` of one situation, and when they are measured. ``first_check``: calls until the first check."""

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

_all: weakref.WeakSet[Chooser[Any, Any]] = weakref.WeakSet()


class Chooser(Generic[S, C]):
    """Situations of type ``S`` and choices of type ``C`` of one form, whose calls may come from several threads.

    Calls that overlap and calls that fail are not measured: their times say nothing. A copy, also an unpickled one,
    remembers nothing. ``_lock`` is held around all that is protected here, for a few operations.
    """

    def __init__(self) -> None:
        _all.add(self)
        self._lock = threading.Lock()
        self._situations: OrderedDict[Hashable, S] = OrderedDict()
        self._choices: OrderedDict[Hashable, C] = OrderedDict()  # the last choice for each kind
        # Weak, so that a call counts as running no longer than it exists, also if Ctrl-C keeps it from being ended.
        self._running: weakref.WeakSet[ChoosingCall] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def _situation(self, kind: Hashable, size: Hashable, make: Callable[[C | None], S]) -> S:
        """The situation of a call that begins. A new one is made from the last choice for its kind."""
        key = kind, size
        if key not in self._situations:
            _put(self._situations, key, make(self._choices.get(kind)))
        self._situations.move_to_end(key)
        self._situations[key].calls += 1
        return self._situations[key]

    def _note_begin(self, call: ChoosingCall) -> None:
        call.alone = not self._running
        for other in self._running:
            other.alone = False
        self._running.add(call)

    def _note_choice(self, kind: Hashable, choice: C) -> None:
        _put(self._choices, kind, choice)


def _put(recent: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    recent[key] = value
    recent.move_to_end(key)
    if len(recent) > SITUATIONS:
        recent.popitem(last=False)


def lower_third(times: Iterable[float]) -> float:
    """The time that counts of several: other load makes calls longer, never shorter.

    The shortest would favour many threads, because the times of threads that compete for Python vary more.
    """
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 3]


@in_forked_child
def _start_afresh_after_fork() -> None:
    """Another thread may have held a lock, or changed a chooser, when the process was forked."""
    for chooser in list(_all):
        chooser.__init__()  # type: ignore[misc]
