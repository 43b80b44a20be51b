"""Times the tasks of `free_threads` in one or more Pythons, whose processes take turns.

This module compares and judges nothing. That is done by `free_threads_report.py` and `test_free_threads.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cpu_slots import Contender
from free_threads import ABOUT, DDP, INFERENCE, SLOTS, TRAINING, Task, ways
from pairs import load

SCRIPT = Path(__file__).with_name("free_threads.py")


@dataclass
class Timed:
    """The seconds of a call of each way of one kind of work, round by round, in one Python."""

    python: str
    lock: bool
    torch: str
    work: str
    layers: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)


class Interpreter:
    """The processes of one Python: one for slots and threads, and two for DDP if that is measured."""

    def __init__(self, single: Contender, ranks: Contender | None) -> None:
        self._single, self._ranks = single, ranks
        (about,) = single.tell(ABOUT)
        self.python: str = about["python"]
        self.lock: bool = about["lock"]
        self.torch: str = about["torch"]

    def has_lock(self) -> bool:
        """Whether it has one now: an import may bring it back to a free-threaded Python."""
        (about,) = self._single.tell(ABOUT)
        return about["lock"]

    def ways(self, work: str) -> list[str]:
        return [*ways(work), *([] if self._ranks is None else [DDP])]

    def seconds(self, task: Task) -> float:
        """Of a call. Two processes take as long as the slower of them."""
        if task.way != DDP:
            (seconds,) = self._single.tell(str(task))
            return seconds
        assert self._ranks is not None
        return max(self._ranks.tell(str(task)))


@contextmanager
def interpreters(pythons: Sequence[str], folder: Path, with_ddp: bool) -> Iterator[list[Interpreter]]:
    """Starts the processes of each of ``pythons``, which are paths, and ends them."""
    with ExitStack() as stack:
        started = []
        for number, python in enumerate(pythons):
            own = [Contender(f"slots of Python {number}", [[]], folder, SCRIPT, python)]
            if with_ddp:
                ranks = [[str(rank), str(folder / f"rendezvous {number}")] for rank in range(SLOTS)]
                own.append(Contender(f"DDP of Python {number}", ranks, folder, SCRIPT, python))
            started.append([stack.enter_context(contender) for contender in own])
        yield [Interpreter(single, *(ranks or [None])) for single, *ranks in started]


def measure(
    pythons: Sequence[Interpreter], layers: Sequence[int], rounds: int, done: Callable[[], object] = lambda: None
) -> list[Timed]:
    """Every way of every Python has a turn in each round, and each round begins with another.

    The first turn of each, in which its model is made, is not counted. ``done`` is called after each kind of work.
    """
    found = []
    for number in layers:
        for work in (INFERENCE, TRAINING):
            own = [Timed(python.python, python.lock, python.torch, work, number) for python in pythons]
            turns = [
                (python, timed, Task(way, work, number))
                for python, timed in zip(pythons, own, strict=True)
                for way in python.ways(work)
            ]
            before = load()
            for turn in range(-1, rounds):
                first = turn % len(turns)
                for python, timed, task in turns[first:] + turns[:first]:
                    seconds = python.seconds(task)
                    if turn >= 0:
                        timed.seconds.setdefault(task.way, []).append(seconds)
            for timed in own:
                timed.loads = [before, load()]
            found += own
            done()
    return found
