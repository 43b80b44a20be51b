"""How many buckets are summed before backward ends, by the recorded order of events."""

import statistics
import threading
from collections.abc import Callable

import pytest

from dataparallel.autograd.bucket_nodes import ToSlots


class Overlap:
    """Notes when a bucket has been summed, and when a replica has the gradient of its first layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._events: list[str] = []
        self._lock = threading.Lock()
        summed = ToSlots.sum_into_envelope

        def noted(*arguments):
            envelope = summed(*arguments)
            self._note("sum")
            return envelope

        monkeypatch.setattr(ToSlots, "sum_into_envelope", noted)

    def note_first_layer(self, *_: object) -> None:
        """A hook for the node that has the first layer's gradient."""
        self._note("first layer")

    def _note(self, event: str) -> None:
        with self._lock:
            self._events.append(event)

    def median_share(self, step: Callable[[], object], slots: int, first_steps: int = 0) -> float:
        """The share of buckets that are summed before the slowest slot has that gradient.

        The median of ten steps, after ``first_steps`` others.
        """
        shares = []
        for number in range(first_steps + 10):
            self._events.clear()
            step()
            assert self._events.count("first layer") == slots
            assert self._events.count("sum") >= 10
            last_slot = max(i for i, event in enumerate(self._events) if event == "first layer")
            if number >= first_steps:
                shares.append(self._events[:last_slot].count("sum") / self._events.count("sum"))
        return statistics.median(shares)
