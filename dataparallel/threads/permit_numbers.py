"""The numbers of permits that `PermitChooser` may choose: what it begins with, and what it prefers.

Where the interpreter has a lock, one thread at a time runs Python. Then a second permit helps only if replicas wait or
compute in long operators, and of equally good numbers the smallest needs fewer threads and less memory. Where there is
no lock, as many replicas run as there are cores: so the search begins there, and other numbers have to be better.
This room times nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import NamedTuple


class Numbers(NamedTuple):
    """The numbers to choose from.

    Attributes:
        ladder: all of them, smallest first.
        first: calls use it before anything is measured.
        preferred: of numbers that are equally good, the nearest to this one is chosen.
    """

    ladder: tuple[int, ...]
    first: int
    preferred: int

    def in_order_of_search(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the numbers from `first` down, and those above it from the smallest up."""
        place = self.ladder.index(self.first)
        return self.ladder[place::-1], self.ladder[place + 1 :]

    def choice_among(self, equally_good: Iterable[int]) -> int:
        """Returns the number that is chosen of several with about the same time."""
        return min(equally_good, key=lambda number: (abs(number - self.preferred), number))


def has_lock() -> bool:
    """True if only one thread at a time runs Python. A free-threaded Python may get its lock back at any import."""
    ask = getattr(sys, "_is_gil_enabled", None)  # Python 3.12 and older have a lock, and no such function
    return True if ask is None else bool(ask())


def numbers_for(at_once: int) -> Numbers:
    """Returns the numbers to choose from if ``at_once`` replicas, at least 1, can run at a time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    powers = {2**exponent for exponent in range(at_once.bit_length())}
    ladder = tuple(sorted(number for number in {*powers, cores, at_once} if number <= at_once))
    if has_lock():
        return Numbers(ladder, first=at_once, preferred=1)
    as_cores = min(cores, at_once)
    return Numbers(ladder, first=as_cores, preferred=as_cores)
