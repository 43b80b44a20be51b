"""How much of the summing of gradients overlaps backward, by the recorded order of events."""

import statistics
import threading
from collections.abc import Callable

import pytest

from dataparallel.bucket_nodes import ToSlots

ENOUGH = 0.8
_TRIES = 4


class Overlap:
    """Notes when a bucket has been summed, and when a replica has its first layer's gradient (`note_first_layer`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._events: list[str] = []
        self._lock = threading.Lock()
        summed = ToSlots.summed

        def noted(*arguments):
            envelope = summed(*arguments)
            self._note("sum")
            return envelope

        monkeypatch.setattr(ToSlots, "summed", noted)

    def note_first_layer(self, *_: object) -> None:
        """A hook on the node that has that gradient."""
        self._note("first layer")

    def _note(self, event: str) -> None:
        with self._lock:
            self._events.append(event)

    def median_share(self, step: Callable[[], object], slots: int, first_steps: int = 0) -> float:
        """Of the buckets, those summed before the slowest slot has that gradient, in ten steps after the first ones.

        Where something else keeps the root's thread from its core, sums come late by no fault of theirs: then the best
        of a few medians counts.
        """
        for _ in range(first_steps):
            step()
        best = 0.0
        for _ in range(_TRIES):
            best = max(best, statistics.median(self._share(step, slots) for _ in range(10)))
            if best >= ENOUGH:
                break
        return best

    def _share(self, step: Callable[[], object], slots: int) -> float:
        self._events.clear()
        step()
        assert self._events.count("first layer") == slots
        assert self._events.count("sum") >= 10
        last_slot = max(i for i, event in enumerate(self._events) if event == "first layer")
        return self._events[:last_slot].count("sum") / self._events.count("sum")
