"""How long devices take, by events with times. A launch returns before its kernel has run, so host times do not tell.

Events are recorded on the streams that compute, so a time includes what a stream waits for: other streams, and a host
that has launched nothing yet. Simulated devices have such events too, and run kernels in the thread that launches them.
This file has not run on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

from dataparallel.streams.current import TimedEvent

__all__ = ["DeviceClock", "Marks"]

Marks: TypeAlias = "dict[torch.device, TimedEvent]"
"""For each device an event."""


class DeviceClock:
    """Marks streams, and says later how long devices took between two marks. Any thread may use it."""

    def __init__(self) -> None:
        self._has_times = True

    def marks(self, streams: Mapping[torch.device, torch.Stream]) -> Marks:
        """An event on each stream; none if the backend has no events with times."""
        if not self._has_times:
            return {}
        try:
            return {device: TimedEvent(stream) for device, stream in streams.items()}
        except (RuntimeError, NotImplementedError):
            self._has_times = False
            return {}

    def seconds(self, begin: Marks, end: Marks) -> dict[torch.device, float]:
        """For each device that is in both the seconds between its marks, which have passed: see `wait_for`."""
        return {device: begin[device].seconds_until(end[device]) for device in begin.keys() & end.keys()}

    @staticmethod
    def wait_for(marks: Iterable[Marks]) -> None:
        """Makes the host wait for marks."""
        for of_devices in marks:
            for event in of_devices.values():
                event.synchronize()
