"""A legal schedule that is as late as possible: work waits in its stream until somebody has to know that it is done.

`nogpu.cuda` has `late_schedule`. ``csrc/runtime/late.cpp`` has the queues, ``csrc/shared/later.cpp`` the
operators in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nogpu.cuda import watching
from nogpu.cuda.watching import Blocks

VARIABLE = "NOGPU_LATE_SCHEDULE"


@dataclass(frozen=True)
class LateCounts:
    """What has happened under a late schedule.

    Attributes:
        postponed: how many operators, copies and fills had to wait in their stream.
        waiting: how many wait now, with waits of one stream for another.
        at_once: how many launches could not wait, by their name. All that their stream had before was done first.
    """

    postponed: int
    waiting: int
    at_once: dict[str, int]


class LateSchedule:
    """What `late_schedule` yields. Its counts are those of all threads since the block began."""

    def __init__(self) -> None:
        self._before = _counts()

    def counts(self) -> LateCounts:
        """Returns what has waited since the block began."""
        now, before = _counts(), self._before
        more = {name: count - before.at_once.get(name, 0) for name, count in now.at_once.items()}
        return LateCounts(
            now.postponed - before.postponed, now.waiting, {name: count for name, count in more.items() if count}
        )


def _counts() -> LateCounts:
    return LateCounts(*watching.compiled().late_counts())


@contextmanager
def late_schedule() -> Iterator[LateSchedule]:
    """While inside, work on the devices is done as late as CUDA allows, for all threads, so values show a missing wait.

    Operators, copies and fills wait in their stream. They are done when the host waits for them, when the answer to a
    query is that they are, or when other work is done that has to come after them. Work that nothing orders after them
    then reads old memory, in every run. At the end of the block all is done that was launched in it.

    Some work cannot wait. It is done at once, after all that its stream was given before: operators whose shapes depend
    on values, or are not known to torch's meta kernels; operators of sparse and quantised tensors, and of other
    libraries; attention that drops weights; collectives; functions of the host; kernels that are compiled at run time.
    ``cudaFree`` waits for all work.

    The clocks look at launches, so they say what they say without it. Switch them off with `clocks` to see the values.
    What is wrong with the arguments of an operator is raised at its launch. What is wrong with values, such as an index
    out of range, is raised by the call that waits, or at the end of the block, with the operator's name. The answer to
    a query is "done" as soon as the work before it can be done, which then is: inside `late_queries` it is "not yet".

    With ``NOGPU_LATE_SCHEDULE=1`` in the environment, a process is late from the start of the stand-in.

    Yields:
        a `LateSchedule`, whose ``counts`` say how many operators have waited, and which could not.
    """
    _blocks.begin()
    try:
        yield LateSchedule()
    finally:
        _blocks.end()


def start_if_told() -> None:
    """Makes the whole process late if the environment says so. ``start`` calls it."""
    if os.environ.get(VARIABLE, "0").lower() not in ("", "0", "false", "no", "off"):
        _blocks.begin()


def _set_late(late: bool) -> None:
    watching.compiled().set_late(late)


_blocks = Blocks(_set_late)
