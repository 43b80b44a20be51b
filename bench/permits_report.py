"""From the times with different numbers of permits to a table and a plot: the chosen number beside the best fixed one.

Does not know how the times were taken, and measures nothing itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pairs import Comparison, Verdict
from plots import figure_for

CAPTION = """\
How many replicas run Python at a time is chosen by the library (workers=None). The table has median milliseconds of a
call on 8 devices with the chosen number and with each fixed one (workers=1 and so on). Simulated devices are no
accelerators: all of them compute on the CPU's cores. Their clocks were off.

at once
    The most replicas that were in forward at the same time, in one call with the chosen number after the timing.
chosen/best
    The time with the chosen number over that of the best fixed one, pair by pair: the median and its bootstrap 95 %
    interval. It should be at most 1.1. The best one has the smallest median of the same calls. Of equally good numbers
    the luckiest is taken, which makes this ratio a little larger than it is.

In the last row the batch changes every 50 calls between 1 and 64 samples for each device. A pair is 100 calls with each
number, and milliseconds are means over them. No calls come before, so the time includes those in which the library
chooses."""

FIXED = (1, 2, 4, 8)
BAR = 1.1


@dataclass(frozen=True)
class Row:
    """One kind of work of one model."""

    model: str
    work: str
    pairs: int
    at_once: str
    chosen_ms: float
    fixed_1_ms: float
    fixed_2_ms: float
    fixed_4_ms: float
    fixed_8_ms: float
    best: int
    over_best: float
    over_best_low: float
    over_best_high: float
    bar: float
    verdict: Verdict
    load_before: float
    load_after: float

    def cells(self) -> dict[str, str]:
        return {
            "model": self.model,
            "work": self.work,
            "chosen": f"{self.chosen_ms:.2f}",
            **{str(number): f"{self.fixed_ms(number):.2f}" for number in FIXED},
            "at once": self.at_once,
            "best": str(self.best),
            "chosen/best": f"{self.over_best:.2f}",
            "95 % interval": f"{self.over_best_low:.2f} to {self.over_best_high:.2f}",
            "pairs": str(self.pairs),
            "at most": f"{self.bar:g}",
            "reached": self.verdict,
            "load": f"{self.load_before:.1f} to {self.load_after:.1f}",
        }

    def fixed_ms(self, number: int) -> float:
        return getattr(self, f"fixed_{number}_ms")


def summarise(
    model: str,
    work: str,
    chosen: Sequence[float],
    fixed: Mapping[int, Sequence[float]],
    at_once: str,
    loads: tuple[float, float],
) -> Row:
    """The row for the seconds of a call with the chosen number and with each fixed one, taken in the same pairs."""
    best = min(fixed, key=lambda number: statistics.median(fixed[number]))
    comparison = Comparison(list(fixed[best]), list(chosen), *loads)
    return Row(
        model=model,
        work=work,
        pairs=comparison.pairs,
        at_once=at_once,
        chosen_ms=1e3 * statistics.median(chosen),
        best=best,
        over_best=comparison.ratio,
        over_best_low=comparison.low,
        over_best_high=comparison.high,
        bar=BAR,
        verdict=comparison.verdict(BAR, at_least=False),
        load_before=comparison.load_before,
        load_after=comparison.load_after,
        **{f"fixed_{number}_ms": 1e3 * statistics.median(fixed[number]) for number in FIXED},
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """For each model and work the time with each number of permits over that of the best fixed one."""
    with figure_for(path, (9, 4)) as figure:
        (axes,) = figure.axes
        places = range(len(rows))
        for number in FIXED:
            over_best = [row.fixed_ms(number) / row.fixed_ms(row.best) for row in rows]
            axes.plot(places, over_best, "_", markersize=18, markeredgewidth=2, label=f"{number} fixed")
        middle = [row.over_best for row in rows]
        spread = [
            [max(0.0, row.over_best - row.over_best_low) for row in rows],
            [max(0.0, row.over_best_high - row.over_best) for row in rows],
        ]
        axes.errorbar(places, middle, yerr=spread, fmt="ko", capsize=4, label="chosen")
        axes.axhline(BAR, color="grey", linestyle="--", linewidth=1, label=f"bar, {BAR:g}")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xticks(places, [f"{row.model}\n{row.work}" for row in rows], rotation=25, ha="right", fontsize="small")
        axes.set_ylabel("time / that of the best fixed number")
        axes.grid(axis="y", alpha=0.3)
        figure.legend(loc="outside right upper", fontsize="small")
