"""From CPU times of growing calls to slopes: microseconds for one more tensor, module or slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_slopes import GROWTHS, IN_A_ROW, INFERENCE, STEP, TORCH, WAYS, Size, Timed
from linear_cost_report import fitted
from plots import figure_for

COMMON = Size()
ONE = {"tensors": "tensor", "modules": "module", "slots": "slot"}

CAPTION = f"""\
CPU time of all threads of the process, and a straight line through the fastest turn of each size, by ordinary least
squares. The model has {COMMON.modules} layer norms of 4 features, on {COMMON.slots} simulated devices without clocks,
and no input besides the batch, unless this is what grows. The library runs one replica at a time. All ways take turns.
If something of the library becomes slower, a slope here becomes larger.

tensors
    Inputs besides the batch. They are split and sent to all slots, and nothing computes with them.
modules
    Layer norms, each with two parameters. So this is what a module costs to copy, to run on all slots, and to sum.
in a row
    The same chunks one after the other on one device: what the operators cost by themselves.
step
    Forward, loss, backward and zero_grad.
µs for one more
    The slope of the line.
beyond its row
    The same less the slope of "in a row": what the library, or torch, takes of the host.
torch/this
    The slope of {TORCH} over that of the row. Above 1, torch's is steeper. Plain copies stand in for
    torch's own copies between devices, and are part of its time.
line begins at, ms
    Where the line meets the axis. The largest sizes decide where the line is.
R²
    The share of the variance that the line explains. Three sizes say little."""


@dataclass(frozen=True)
class Row:
    """One way to do one kind of work, while one thing grows. `numbers` and `milliseconds` are the points."""

    grows: str
    work: str
    way: str
    numbers: str
    milliseconds: str
    slope_microseconds: float
    beyond_row_microseconds: float
    torch_over_this: float
    intercept_milliseconds: float
    r_squared: float
    turns: int

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        first, *_, last = self.numbers.split()
        return {
            "one more": ONE[self.grows],
            "from, to": f"{first} to {int(last):,}",
            "work": self.work,
            "way": self.way,
            "µs for one more": f"{self.slope_microseconds:,.1f}",
            "beyond its row": "" if self.way == IN_A_ROW else f"{self.beyond_row_microseconds:,.1f}",
            "torch/this": "" if self.way in (IN_A_ROW, TORCH) else f"{self.torch_over_this:.2f}",
            "line begins at, ms": f"{self.intercept_milliseconds:.2f}",
            "R²": f"{self.r_squared:.4f}",
        }

    def points(self) -> tuple[list[float], list[float]]:
        return [float(number) for number in self.numbers.split()], [float(ms) for ms in self.milliseconds.split()]


def summarise(found: Sequence[Timed]) -> list[Row]:
    """A row for each of them. Each growth and kind of work has to have times in a row and of torch."""
    lines = {(each.grows, each.work, each.way): fitted(each.numbers, fastest(each)) for each in found}
    rows = []
    for each in found:
        line = lines[each.grows, each.work, each.way]
        rows.append(
            Row(
                grows=each.grows,
                work=each.work,
                way=each.way,
                numbers=" ".join(map(str, each.numbers)),
                milliseconds=" ".join(f"{ms:.4g}" for ms in fastest(each)),
                slope_microseconds=1e3 * line.slope,
                beyond_row_microseconds=1e3 * (line.slope - lines[each.grows, each.work, IN_A_ROW].slope),
                torch_over_this=lines[each.grows, each.work, TORCH].slope / line.slope,
                intercept_milliseconds=line.intercept,
                r_squared=line.r_squared,
                turns=len(each.seconds[0]),
            )
        )
    return rows


def fastest(timed: Timed) -> list[float]:
    """Milliseconds of each size. Whatever else the machine does only adds to the time."""
    return [1e3 * min(seconds) for seconds in timed.seconds]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Points and lines: a row of axes for each kind of work, a column for each thing that grows."""
    whats, works = [growth.what for growth in GROWTHS], (INFERENCE, STEP)
    with figure_for(path, (14, 8), rows=len(works), columns=len(whats)) as figure:
        places = [(work, what) for work in works for what in whats]
        for axes, (work, what) in zip(figure.axes, places, strict=True):
            for row in rows:
                if (row.work, row.grows) != (work, what):
                    continue
                numbers, milliseconds = row.points()
                label = f"{row.way}: {row.slope_microseconds:,.1f} µs"
                style = "--" if row.way in (IN_A_ROW, TORCH) else "-"
                color = f"C{WAYS[INFERENCE].index(row.way)}"  # the same in all axes
                axes.plot(numbers, milliseconds, "o", markersize=4, color=color)
                ends = numbers[0], numbers[-1]
                heights = [1e-3 * row.slope_microseconds * x + row.intercept_milliseconds for x in ends]
                axes.plot(ends, heights, style, color=color, linewidth=1, label=label)
            axes.set_title(f"{work}, for one more {ONE[what]}", fontsize="medium")
            axes.set_xlabel(what)
            axes.set_ylabel("milliseconds of CPU time")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="x-small")
