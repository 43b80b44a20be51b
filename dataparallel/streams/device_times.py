"""How long devices take, by events with times. A launch returns before its kernel has run, so host times do not tell.

Events are recorded on the streams that compute, so a time includes what a stream waits for: other streams, and a host
that has launched nothing yet. Simulated devices have such events too, and run kernels in the thread that launches them.
``tracing`` waits for its marks. ``threads.permits`` never does: it reads those that have passed. This file has not run
on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from dataparallel.streams.current import TimedEvent

__all__ = ["DeviceClock", "Marks"]

Marks: TypeAlias = "dict[Any, TimedEvent]"
"""An event for each device, or for each stream."""


class DeviceClock:
    """Marks streams, and says later how long devices took between two marks. Any thread may use it."""

    def __init__(self) -> None:
        self._has_times = True

    def marks(self, streams: Mapping[Any, torch.Stream]) -> Marks:
        """An event on each stream; none if the backend has no events with times."""
        if not self._has_times:
            return {}
        try:
            return {key: TimedEvent(stream) for key, stream in streams.items()}
        except (RuntimeError, NotImplementedError):
            self._has_times = False
            return {}

    def seconds(self, begin: Marks, end: Marks) -> dict[Any, float]:
        """For each key of both the seconds between its marks, to which the devices have come."""
        return {key: begin[key].seconds_until(end[key]) for key in begin.keys() & end.keys()}

    @staticmethod
    def have_passed(marks: Marks) -> bool:
        """True if the devices have come to all of these marks. The host does not wait."""
        return all(event.has_passed() for event in marks.values())

    @staticmethod
    def wait_for(marks: Iterable[Marks]) -> None:
        """Makes the host wait for marks."""
        for each in marks:
            for event in each.values():
                event.synchronize()
