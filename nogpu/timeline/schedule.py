"""A schedule: when each launch runs on a machine, and what that says of the step."""

from __future__ import annotations

import os
from functools import cached_property

from nogpu.timeline import breakdown, shown
from nogpu.timeline.breakdown import Busy, Step, Thread, Wait, WaitGroup
from nogpu.timeline.intervals import length_of_union
from nogpu.timeline.launches import Recording
from nogpu.timeline.machine import Machine
from nogpu.timeline.solve import Solution, solve


class Schedule:
    """When each launch of a recording would run on a machine, and what follows from it.

    All times are seconds, those of launches from the beginning. Everything is computed when it is first asked for.

    Attributes:
        solution: the times of all launches, and what bound them.
    """

    def __init__(self, solution: Solution) -> None:
        self.solution = solution

    @property
    def recording(self) -> Recording:
        """What was scheduled."""
        return self.solution.recording

    @property
    def machine(self) -> Machine:
        """Where it was scheduled."""
        return self.solution.machine

    @property
    def issue(self) -> list[float]:
        """For each launch when the host begins to issue it."""
        return self.solution.issue

    @property
    def start(self) -> list[float]:
        """For each launch when its device starts it."""
        return self.solution.start

    @property
    def end(self) -> list[float]:
        """For each launch when its device has ended it."""
        return self.solution.end

    @cached_property
    def time(self) -> float:
        """The time of the step: when the last launch has ended."""
        return self.solution.time

    @cached_property
    def streams(self) -> list[Busy]:
        """What each stream of the recording does."""
        return breakdown.busy_streams(self.solution)

    @cached_property
    def devices(self) -> list[Busy]:
        """What each device of the machine does."""
        return breakdown.busy_devices(self.solution)

    @cached_property
    def links(self) -> dict[str, float]:
        """For each link of the machine the seconds in which it serves at least one copy."""
        return breakdown.busy_links(self.solution)

    @cached_property
    def communication(self) -> float:
        """Seconds in which at least one copy between two places runs."""
        return breakdown.time_of_copies(self.solution)

    @cached_property
    def exposed_communication(self) -> float:
        """By how much the step would be shorter if copies between places took no time and occupied no link.

        The host costs the same in both.
        """
        return self.time - solve(self.recording, self.machine, are_copies_free=True).time

    @cached_property
    def overlap(self) -> float:
        """The part of `communication`, in percent, that the step does not wait for; 100 if nothing is copied.

        It is 0 also where the step waits for longer than links are busy. That happens where a copy that could start
        waits for its turn behind one that cannot yet.
        """
        if not self.communication:
            return 100.0
        return max(0.0, 100 * (1 - self.exposed_communication / self.communication))

    @cached_property
    def critical_path(self) -> list[Step]:
        """The chain of launches that makes the step as long as it is, from its beginning to its end."""
        return breakdown.critical_path(self.solution)

    @cached_property
    def waits(self) -> list[Wait]:
        """Waits that cost time, the longest first: for launches on other streams, and for links.

        A wait costs the time in which a launch has reached the device and its stream is free, but it does not start.
        """
        return breakdown.waits_by_cost(self.solution)

    @cached_property
    def grouped_waits(self) -> list[WaitGroup]:
        """`waits` of the same operators on the same streams together, the largest sum first."""
        return breakdown.grouped(self.waits, self.solution)

    @cached_property
    def threads(self) -> list[Thread]:
        """What each thread of the host does."""
        return breakdown.threads_of(self.solution)

    @cached_property
    def host_idle(self) -> float:
        """Seconds in which no thread of the host issues a launch."""
        spans = zip(self.solution.issue, self.solution.reached, strict=True)
        return self.time - length_of_union(spans)

    def summary(self) -> str:
        """A table: time of the step, communication, devices, streams, threads, longest waits, critical path."""
        return shown.table(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the schedule: a row for each thread of the host and for each stream.

        Args:
            path: the file. Its suffix says the format, such as ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            RuntimeError: if matplotlib is not installed.
        """
        shown.draw(self, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the schedule for https://ui.perfetto.dev or ``chrome://tracing``, as JSON.

        A device is a process there and a stream is a thread of it. Arrows show waits.

        Args:
            path: the file, such as ``step.json``.
        """
        shown.write(self, path)


def schedule(recording: Recording, machine: Machine) -> Schedule:
    """Computes when each launch would run.

    The host issues launches in the recorded order of each thread, at the cost that `machine.host` says, and waits where
    it has waited. A stream runs its launches in their order. A launch starts when it has reached the device, its stream
    is free, everything that it waits for has ended and, for a copy between two places, all links of its path are free.
    A kernel with peers begins like a copy and then moves one piece after the other, each when the links of its path are
    free for as long as it takes. The same recording on the same machine has the same schedule. Without such kernels it
    is not longer on a machine that is better in any respect.

    Raises:
        ValueError: if the recording uses more devices than the machine has, a dtype for which the machine has no rate,
            or contradicts itself.
    """
    return Schedule(solve(recording, machine))
