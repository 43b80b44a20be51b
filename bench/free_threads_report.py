"""From the times of two slots in Pythons with and without a lock to the rows of a table, and to a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from free_slots import Timed
from free_threads import ALONE, CALLS, COLLECT_AFTER, DDP, INFERENCE, THREADS, TRAINING
from launch_bound import OPERATORS_PER_LAYER, SAMPLES_PER_SLOT, WIDTH
from pairs import Comparison
from plots import figure_for

BARS = {INFERENCE: 1.25, TRAINING: 1.35}
"""How many times as long two slots may take as one of them alone, where Python has no lock."""

CAPTION = f"""\
Two CPU slots, on two cores, each with one intra-op thread and half of the batch. The models are linear layers of width
{WIDTH} in a row, each with an activation, for {SAMPLES_PER_SLOT} samples a slot: their time is that of launching
operators. training is forward, loss and backward.

python
    "lock" is a Python whose interpreter lock lets one thread at a time run Python code. "free" is a free-threaded one.
operators
    Of one forward pass in one slot.
two plain threads
    Without the library: each thread has a model of its own and half of the batch. Nothing is scattered, copied,
    gathered or summed. It is the floor for two slots of one process.
two processes, DDP
    DistributedDataParallel with gloo, half of the batch in each process. In inference the processes do nothing
    together.
workers=2
    Slots that share a random generator train one after the other, so that random draws have a fixed order. With
    workers=2 they train at the same time.
collector
    All processes collect garbage after {COLLECT_AFTER:,} new objects. By default it is after 2,000, which is more than
    once in a step, and a collection of a free-threaded Python looks at all objects of the process.
ms
    The median over the rounds. In a round each way of each Python has a turn of {CALLS} calls, whose mean counts.
``/alone``
    The time over that of one thread alone with half of the batch, in the same round: the median and its 95 % interval.
    1 would be perfect, and 2 is no better than one slot after the other.
at most
    The bar for forms in a Python without a lock, and whether the ratio is at or below it.
``/threads``, ``/DDP``
    The time over that of two plain threads, and of two processes. Below 1, slots are faster."""


@dataclass(frozen=True)
class Row:
    """One way to do one kind of work with one model in one Python."""

    python: str
    lock: bool
    torch: str
    operators: int
    work: str
    way: str
    milliseconds: float
    over_alone: float
    over_alone_low: float
    over_alone_high: float
    bar: float | None
    within_bar: str
    over_threads: float
    over_processes: float | None
    rounds: int
    load_before: float
    load_after: float

    @property
    def name(self) -> str:
        return f"{self.python}, {'lock' if self.lock else 'free'}"

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "python": self.name,
            "operators": str(self.operators),
            "work": self.work,
            "way": self.way,
            "ms": f"{self.milliseconds:.2f}",
            "/alone": f"{self.over_alone:.2f} [{self.over_alone_low:.2f}, {self.over_alone_high:.2f}]",
            "at most": "" if self.bar is None else f"{self.bar:g}: {self.within_bar}",
            "/threads": f"{self.over_threads:.2f}",
            "/DDP": "" if self.over_processes is None else f"{self.over_processes:.2f}",
        }


def rows_of(timed: Timed, decided: bool) -> list[Row]:
    """A row for each way. Unless ``decided``, there are too few rounds to judge by the bar."""
    rows = []
    for way, seconds in timed.seconds.items():
        over_alone = Comparison(timed.seconds[ALONE], seconds)
        bar = None if timed.lock or way in (ALONE, THREADS, DDP) else BARS[timed.work]
        verdict = "not decided"
        if bar is not None and decided:
            verdict = over_alone.verdict(bar, at_least=False)
        rows.append(
            Row(
                python=timed.python,
                lock=timed.lock,
                torch=timed.torch,
                operators=OPERATORS_PER_LAYER * timed.layers,
                work=timed.work,
                way=way,
                milliseconds=1e3 * statistics.median(seconds),
                over_alone=over_alone.ratio,
                over_alone_low=over_alone.low,
                over_alone_high=over_alone.high,
                bar=bar,
                within_bar="" if bar is None else verdict,
                over_threads=Comparison(timed.seconds[THREADS], seconds).ratio,
                over_processes=Comparison(timed.seconds[DDP], seconds).ratio if DDP in timed.seconds else None,
                rounds=len(seconds),
                load_before=timed.loads[0],
                load_after=timed.loads[-1],
            )
        )
    return rows


def summarise(found: Iterable[Timed], decided: bool) -> list[Row]:
    """The rows, those of one kind of work with one model together, and the Pythons one after the other."""
    return [row for timed in found for row in rows_of(timed, decided)]


def pythons_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(f"Python {row.name}, torch {row.torch}" for row in rows))


def plot(rows: Sequence[Row], path: Path) -> None:
    """The time over that of one thread alone, against the number of operators: a column of axes for each Python."""
    names = list(dict.fromkeys(row.name for row in rows))
    ways_in_order = list(dict.fromkeys(row.way for row in rows))
    works = [INFERENCE, TRAINING]
    with figure_for(path, (5.5 * len(names) + 2, 7), rows=2, columns=len(names), sharey="row") as figure:
        places = [(work, name) for work in works for name in names]
        for axes, (work, name) in zip(figure.axes, places, strict=True):
            own = [row for row in rows if (row.work, row.name) == (work, name)]
            for way in dict.fromkeys(row.way for row in own if row.way != ALONE):
                line = [row for row in own if row.way == way]
                style = "o--" if way in (THREADS, DDP) else "o-"
                color = f"C{ways_in_order.index(way)}"  # the same in all axes
                points = [row.operators for row in line], [row.over_alone for row in line]
                axes.plot(*points, style, color=color, label=way)
            axes.axhline(BARS[work], color="grey", linewidth=1, linestyle=":")
            axes.set_title(f"{work}, Python {name}", fontsize="medium")
            axes.set_xlabel("operators")
            axes.set_ylabel("time / that of one slot alone")
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.grid(alpha=0.3)
            axes.legend(fontsize="x-small")
