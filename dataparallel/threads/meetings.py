"""Meetings: where the replicas of one call wait for each other inside ``forward``.

``parallel_apply`` makes a `Meeting` for each call and runs each replica at its `Place`. ``peers`` asks for the place of
the running replica and meets the others there. This file moves no tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from dataparallel.threads.slot_times import waiting

__all__ = ["Meeting", "Place", "here"]

T = TypeVar("T")


class Place:
    """Where one replica of a call stands.

    Attributes:
        index: the replica's number, in slot order.
        meeting: of the call.
    """

    def __init__(self, index: int, meeting: Meeting) -> None:
        self.index, self.meeting = index, meeting

    @property
    def count(self) -> int:
        """How many replicas the call has."""
        return len(self.meeting.devices)

    def meet(self, what: Hashable, value: Any, together: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Waits until every replica of the call has come with an equal ``what``, and returns this replica's result.

        The last replica that comes calls ``together`` with the values of all in slot order. It returns one result for
        each replica.
        """
        return self.meeting.meet(self.index, what, value, together)


_here: ContextVar[Place | None] = ContextVar("dataparallel_place", default=None)


def here() -> Place | None:
    """The place of the replica that this thread runs; ``None`` outside of a parallel forward."""
    return _here.get()


class Meeting:
    """The meetings of one call with a replica on each of ``devices``."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._changed = threading.Condition()
        self._values: dict[int, Any] = {}
        self._results: list[Any] = []
        self._round = 0
        self._failed = False

    def run(self, index: int, task: Callable[[], T]) -> T:
        """Runs the replica's ``task`` at its place."""
        token = _here.set(Place(index, self))
        try:
            return task()
        except BaseException:
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise
        finally:
            _here.reset(token)

    def meet(self, index: int, what: Hashable, value: Any, together: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """See `Place.meet`."""
        with waiting(), self._changed:
            mine = self._round
            self._values[index] = value
            if len(self._values) == len(self.devices):
                self._results = list(together([self._values[slot] for slot in range(len(self.devices))]))
                self._values, self._round = {}, mine + 1
                self._changed.notify_all()
            while self._round == mine and not self._failed:
                self._changed.wait(timeout=0.2)
            if self._round == mine:
                raise RuntimeError("another replica failed")
            return self._results[index]
