"""The critical path: the chain of launches, without a gap, that makes a step as long as it is."""

from __future__ import annotations

from dataclasses import dataclass

from dataparallel.testing.simulated.timeline.solve import Bound, Solution

__all__ = ["Step", "critical_path"]


@dataclass(frozen=True)
class Step:
    """A part of the critical path: a launch that runs on a device, or one that the host issues.

    Attributes:
        launch: its index.
        op: its operator.
        on: ``device`` if it runs, ``host`` if it is issued.
        start: in seconds from the beginning, where the step before ends.
        end: in seconds, where the next step starts.
        bound: why it does not begin earlier, as in `Bound`.
    """

    launch: int
    op: str
    on: str
    start: float
    end: float
    bound: Bound

    @property
    def seconds(self) -> float:
        """Its part of the time of the step."""
        return self.end - self.start


def critical_path(solution: Solution) -> list[Step]:
    """The steps in their order. Each starts where the one before ends, so together they take the whole time.

    Steps that take no time are left out.
    """
    if not solution.order:
        return []
    steps: list[Step] = []
    index = max(solution.order, key=solution.end.__getitem__)
    on, until = "device", solution.end[index]
    while index >= 0:
        if on == "device":
            start, bound = solution.start[index], solution.start_bound[index]
        else:
            start, bound = solution.issue[index], solution.issue_bound[index]
        if until > start:
            steps.append(Step(index, solution.recording.launches[index].op, on, start, until, bound))
        on = "device" if bound.kind in ("stream", "wait", "link", "host wait") else "host"
        index, until = bound.launch, start
    return steps[::-1]
