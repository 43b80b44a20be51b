"""From times and memory of CPU slots, of one module and of DDP to the rows of a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pairs import Comparison

CAPTION = """\
A training step without its optimizer by DataParallel on two CPU slots, which takes turns with each of the others.

processes x threads
    Threads are the intra-op threads of torch in each process.
ms
    The median step. It includes about 0.1 ms for telling the processes what to do.
slots/this
    The time of DataParallel over that of the row: the median over the pairs, and its 95 % interval. Below 1,
    DataParallel is faster.
at most
    The bar, and whether the ratio is at or below it: "not decided" where the bar lies in the interval, or where there
    are too few pairs.
MiB
    The memory of the processes of the row after ten steps, as proportional set size without sharing with other
    processes. Measured once; fresh processes differ by a few per cent.
memory slots/this
    The memory of DataParallel over that of the row."""

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """One way to make the step. All but the row of `DataParallel` have its time and memory over their own."""

    contender: str
    processes: int
    threads_per_process: int
    milliseconds: float
    slots_over_this: float | None
    slots_over_this_low: float | None
    slots_over_this_high: float | None
    bar: float | None
    within_bar: str
    mebibytes: float | None
    memory_of_slots_over_this: float | None
    memory_bar: float | None
    within_memory_bar: str
    pairs: int
    load_before: float
    load_after: float

    def cells(self) -> dict[str, str]:
        ratio, low, high = self.slots_over_this, self.slots_over_this_low, self.slots_over_this_high
        share = self.memory_of_slots_over_this
        return {
            "step by": self.contender,
            "processes x threads": f"{self.processes} x {self.threads_per_process}",
            "ms": f"{self.milliseconds:.0f}",
            "slots/this": "" if ratio is None else f"{ratio:.3f} [{low:.3f}, {high:.3f}]",
            "at most": judged(self.bar, self.within_bar),
            "MiB": NOT_MEASURED if self.mebibytes is None else f"{self.mebibytes:.0f}",
            "memory slots/this": "" if share is None else f"{share:.2f}",
            "at  most": judged(self.memory_bar, self.within_memory_bar),
        }


def judged(bar: float | None, verdict: str) -> str:
    return "" if bar is None else f"{bar:g}: {verdict}"


@dataclass(frozen=True)
class Other:
    """What `DataParallel` is compared with, and the bars. The other's times are ``compared.theirs``."""

    name: str
    processes: int
    threads: int
    compared: Comparison
    bar: float | None
    memory: int | None
    memory_bar: float | None = None


def summarise(name: str, threads: int, memory: int | None, others: Sequence[Other]) -> list[Row]:
    """A row for `DataParallel`, with ``memory`` in bytes, and one for each of the others."""
    first = others[0].compared
    rows = [
        Row(
            contender=name,
            processes=1,
            threads_per_process=threads,
            milliseconds=1e3 * statistics.median(first.ours),
            slots_over_this=None,
            slots_over_this_low=None,
            slots_over_this_high=None,
            bar=None,
            within_bar="",
            mebibytes=mebibytes(memory),
            memory_of_slots_over_this=None,
            memory_bar=None,
            within_memory_bar="",
            pairs=first.pairs,
            load_before=first.load_before,
            load_after=first.load_after,
        )
    ]
    return rows + [beside(other, memory) for other in others]


def beside(other: Other, memory: int | None) -> Row:
    ours_over_theirs = other.compared.swapped
    share = memory / other.memory if memory and other.memory else None
    within = ""
    if other.memory_bar is not None:
        within = NOT_MEASURED if share is None else "yes" if share <= other.memory_bar else "no"
    return Row(
        contender=other.name,
        processes=other.processes,
        threads_per_process=other.threads,
        milliseconds=1e3 * statistics.median(other.compared.theirs),
        slots_over_this=ours_over_theirs.ratio,
        slots_over_this_low=ours_over_theirs.low,
        slots_over_this_high=ours_over_theirs.high,
        bar=other.bar,
        within_bar="" if other.bar is None else ours_over_theirs.verdict(other.bar, at_least=False),
        mebibytes=mebibytes(other.memory),
        memory_of_slots_over_this=share,
        memory_bar=other.memory_bar,
        within_memory_bar=within,
        pairs=other.compared.pairs,
        load_before=other.compared.load_before,
        load_after=other.compared.load_after,
    )


def mebibytes(size: int | None) -> float | None:
    return None if size is None else size / 2**20
