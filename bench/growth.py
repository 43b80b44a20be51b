"""Costs on the host that grow: CPU time of calls that take turns, and a straight line through it.

Times are CPU time of all threads of the process. A call of two seconds is never left alone on a machine that does other
things too, and CPU time suffers less from that than time on the clock.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plots import draw_lines
from reporting import Row


@dataclass(frozen=True)
class Line:
    """Milliseconds for each of ``numbers``, and the straight line through them, by ordinary least squares.

    `r_squared` is one minus the sum of squares of the residuals over that around the mean.
    """

    numbers: Sequence[int]
    milliseconds: Sequence[float]
    slope: float
    intercept: float
    r_squared: float

    def points(self, name: str) -> dict[str, str]:
        """As a report has them; ``name`` is that of the numbers."""
        points = " ".join(f"{ms:.4g}" for ms in self.milliseconds)
        return {name: " ".join(map(str, self.numbers)), "milliseconds": points}


def fitted(numbers: Sequence[int], seconds: Sequence[Sequence[float]]) -> Line:
    """Through the fastest turn of each number: whatever else the machine does only adds to the time."""
    y = np.asarray([1e3 * min(turns) for turns in seconds])
    slope, intercept = np.polyfit(numbers, y, 1)
    residuals = y - (slope * np.asarray(numbers) + intercept)
    around_mean = y - y.mean()
    r_squared = 1 - residuals @ residuals / (around_mean @ around_mean)
    return Line(numbers, y.tolist(), float(slope), float(intercept), float(r_squared))


def cpu_seconds(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """CPU seconds of each of ``calls``, which have two turns in a round, after a round without timing.

    A round goes up the calls and down again, so that each call follows one of its own or of a neighbouring size. The
    first call after a much larger one would pay for memory that was freed, but not yet sorted.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    order = [*range(len(calls)), *reversed(range(len(calls)))]
    gc.collect()
    gc.freeze()
    for number in range(-1, rounds):
        for place in order:
            gc.collect()
            start = time.process_time()
            calls[place]()
            if number >= 0:
                seconds[place].append(time.process_time() - start)
    gc.unfreeze()
    return seconds


def draw_growth(
    axes: Any, lines: Iterable[tuple[str, Row, float, str, str]], x: str, points: str, title: str = ""
) -> None:
    """Points and lines. Each has a label, a row with its ``points``, a slope in milliseconds, a style and a color."""
    drawn = []
    for label, row, slope, style, color in lines:
        numbers = [float(number) for number in row[points].split()]
        axes.plot(numbers, [float(ms) for ms in row["milliseconds"].split()], "o", markersize=4, color=color)
        ends = [numbers[0], numbers[-1]]
        drawn.append((label, ends, [slope * number + row["intercept_milliseconds"] for number in ends], style + color))
    draw_lines(axes, drawn, title, x, "milliseconds of CPU time")
    axes.legend(fontsize="x-small")
