"""`schedule`: when each recorded launch would run on a machine. A prediction, computed from published rates.

``solve`` computes the times, ``answers`` what they say; ``summary``, ``picture`` and ``trace`` show them.
"""

from __future__ import annotations

import os

from dataparallel.testing.simulated.timeline import picture, summary, trace
from dataparallel.testing.simulated.timeline.answers import Answers
from dataparallel.testing.simulated.timeline.launches import Recording
from dataparallel.testing.simulated.timeline.machine import Machine
from dataparallel.testing.simulated.timeline.solve import solve

__all__ = ["Schedule", "schedule"]


class Schedule(Answers):
    """When each launch of a recording would run on a machine, and what follows from it: see `Answers`."""

    def summary(self) -> str:
        """A table: time of the step, communication, devices, streams, threads, longest waits, critical path."""
        return summary.table(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the schedule: a row for each thread of the host and for each stream.

        Args:
            path: the file. Its suffix says the format, such as ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            RuntimeError: if matplotlib is not installed.
        """
        picture.draw(self, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the schedule for https://ui.perfetto.dev or ``chrome://tracing``, as JSON.

        A device is a process there and a stream is a thread of it. Arrows show waits.

        Args:
            path: the file, such as ``step.json``.
        """
        trace.write(self, path)


def schedule(recording: Recording, machine: Machine) -> Schedule:
    """Computes when each launch would run.

    The host issues launches in the recorded order of each thread, at the cost that `machine.host` says, and waits where
    it has waited. A stream runs its launches in their order. A launch starts when it has reached the device, its stream
    is free, everything that it waits for has ended and, for a copy between two places, all links of its path are free.
    The same recording on the same machine has the same schedule, and on a machine that is better in any respect it is
    not longer.

    Raises:
        ValueError: if the recording uses more devices than the machine has, a dtype for which the machine has no rate,
            or contradicts itself.
    """
    return Schedule(solve(recording, machine))
