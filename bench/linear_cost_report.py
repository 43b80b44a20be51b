"""From costs on the host to a table and a plot: a straight line through them, and how well it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from linear_cost import CALLS, Size
from plots import figure_for

R_SQUARED_BAR = 0.98

CAPTION = """\
CPU time of all threads of the process, and a straight line through the fastest turn of each size, by ordinary least
squares. replicate makes replicas with gradients recorded and lets go of them. inference is a call of the wrapper
without gradients. training is a call of the wrapper, its backward and zero_grad; on one slot the wrapper just calls the
module, so its first point lies below the line. Simulated devices, their clocks off, one replica at a time.

µs for one more
    The slope of the line: one more slot, or one more parameter on each of the slots.
µs per parameter and slot
    The slope divided by the number of parameters or of slots that all sizes had. The two need not agree: a slot costs
    something besides its parameters.
line begins at, ms
    Where the line meets the axis. For parameters it says little about small models: the largest sizes decide where the
    line is, and one per cent of them is more than all that a small model costs.
R²
    The share of the variance that the line explains. Near 1 nothing grows faster than linearly. For parameters the two
    or three largest sizes decide it; the plot, whose axes are logarithmic, shows the small ones."""


class Line(NamedTuple):
    slope: float
    intercept: float
    r_squared: float


def fitted(x: Sequence[float], y: Sequence[float]) -> Line:
    """Ordinary least squares. R² is one minus the sum of squares of the residuals over that around the mean."""
    slope, intercept = np.polyfit(x, y, 1)
    residuals = np.asarray(y) - (slope * np.asarray(x) + intercept)
    around_mean = np.asarray(y) - np.mean(y)
    return Line(float(slope), float(intercept), float(1 - residuals @ residuals / (around_mean @ around_mean)))


@dataclass(frozen=True)
class Row:
    """One call for a growing number of "slots" or "parameters". `sizes` and `milliseconds` are the points."""

    call: str
    grows: str
    other: int
    sizes: str
    milliseconds: str
    slope_microseconds: float
    per_parameter_and_slot_microseconds: float
    intercept_milliseconds: float
    r_squared: float
    within_bar: str
    turns: int

    def cells(self) -> dict[str, str]:
        first, *_, last = self.sizes.split()
        others = "parameters" if self.grows == "slots" else "slots"
        return {
            "call": self.call,
            "against": f"{first} to {int(last):,} {self.grows}",
            "with": f"{self.other} {others}",
            "µs for one more": f"{self.slope_microseconds:,.1f}",
            "µs per parameter and slot": f"{self.per_parameter_and_slot_microseconds:.2f}",
            "line begins at, ms": f"{self.intercept_milliseconds:.2f}",
            "R²": f"{self.r_squared:.4f}",
            f"at least {R_SQUARED_BAR}": self.within_bar,
        }

    def points(self) -> tuple[list[float], list[float]]:
        return [float(size) for size in self.sizes.split()], [float(ms) for ms in self.milliseconds.split()]


def summarise(grows: str, sizes: Sequence[Size], decided: bool) -> list[Row]:
    """A row for each call. Unless ``decided``, there are too few sizes or turns to judge by the bar."""
    rows = []
    for call in CALLS:
        numbers = [size.slots if grows == "slots" else size.parameters for size in sizes]
        other = sizes[0].parameters if grows == "slots" else sizes[0].slots
        fastest = [1e3 * size.fastest(call) for size in sizes]
        line = fitted(numbers, fastest)
        verdict = "yes" if line.r_squared >= R_SQUARED_BAR else "no"
        rows.append(
            Row(
                call=call,
                grows=grows,
                other=other,
                sizes=" ".join(map(str, numbers)),
                milliseconds=" ".join(f"{ms:.4g}" for ms in fastest),
                slope_microseconds=1e3 * line.slope,
                per_parameter_and_slot_microseconds=1e3 * line.slope / other,
                intercept_milliseconds=line.intercept,
                r_squared=line.r_squared,
                within_bar=verdict if decided else "not decided",
                turns=len(sizes[0].seconds[call]),
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """Points and lines, with slots on the left and parameters on the right, where both axes are logarithmic."""
    with figure_for(path, (9.5, 3.8), columns=2) as figure:
        for axes, grows in zip(figure.axes, ("slots", "parameters"), strict=True):
            own = [row for row in rows if row.grows == grows]
            for row in own:
                sizes, milliseconds = row.points()
                (points,) = axes.plot(sizes, milliseconds, "o", markersize=4, label=row.call)
                x = np.geomspace(sizes[0], sizes[-1], 200)
                y = 1e-3 * row.slope_microseconds * x + row.intercept_milliseconds
                shown = y > 0  # a line may begin below nothing
                label = f"{row.slope_microseconds:,.1f} µs each, R² {row.r_squared:.4f}"
                axes.plot(x[shown], y[shown], color=points.get_color(), linewidth=1, label=label)
            if grows == "parameters":
                axes.set_xscale("log")
                axes.set_yscale("log")
            axes.set_title(f"{own[0].other} {'parameters' if grows == 'slots' else 'slots'}")
            axes.set_xlabel(grows)
            axes.set_ylabel("milliseconds of CPU time")
            axes.grid(alpha=0.3)
            axes.legend(fontsize="x-small")
