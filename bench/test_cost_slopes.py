"""What one more tensor, module and slot costs the host, by each form and by ``torch.nn.DataParallel``: slopes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from child_processes import printed_by
from cost_slopes import GROWTHS, IN_A_ROW, INFERENCE, STEP, TORCH, WAYS, WRAPPER, Size, Timed
from plots import draw_lines, figure_for
from reporting import Report, Row

ROUNDS, SHORT_ROUNDS = 12, 1
MOST, SHORT_MOST = 1000, 10

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

TABLE = {
    "one more": lambda row: ONE[row["grows"]],
    "from, to": lambda row: f"{row['numbers'].split()[0]} to {int(row['numbers'].split()[-1]):,}",
    "work": "{work}",
    "way": "{way}",
    "µs for one more": "{slope_microseconds:,.1f}",
    "beyond its row": lambda row: "" if row["way"] == IN_A_ROW else f"{row['beyond_row_microseconds']:,.1f}",
    "torch/this": lambda row: "" if row["way"] in (IN_A_ROW, TORCH) else f"{row['torch_over_this']:.2f}",
    "line begins at, ms": "{intercept_milliseconds:.2f}",
    "R²": "{r_squared:.4f}",
}


def line_through(timed: Timed) -> dict[str, Any]:
    """Milliseconds for each number and the straight line through them, by ordinary least squares.

    It goes through the fastest turn of each number: whatever else the machine does only adds to the time.
    """
    y = np.asarray([1e3 * min(turns) for turns in timed.seconds])
    slope, intercept = np.polyfit(timed.numbers, y, 1)
    residuals, around_mean = y - (slope * np.asarray(timed.numbers) + intercept), y - y.mean()
    return {
        "numbers": " ".join(map(str, timed.numbers)),
        "milliseconds": " ".join(f"{ms:.4g}" for ms in y),
        "slope_microseconds": 1e3 * float(slope),
        "intercept_milliseconds": float(intercept),
        "r_squared": float(1 - residuals @ residuals / (around_mean @ around_mean)),
        "turns": len(timed.seconds[0]),
    }


def rows_of(found: Sequence[Timed]) -> list[dict[str, Any]]:
    """A row for each of them. Each growth and kind of work has to have times in a row and of torch."""
    lines = {(each.grows, each.work, each.way): line_through(each) for each in found}
    rows = []
    for (grows, work, way), line in lines.items():
        slope = line["slope_microseconds"]
        in_a_row, torchs = (lines[grows, work, other]["slope_microseconds"] for other in (IN_A_ROW, TORCH))
        beside = {"beyond_row_microseconds": slope - in_a_row, "torch_over_this": torchs / slope}
        rows.append({"grows": grows, "work": work, "way": way, **line, **beside})
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """Points and lines: a row of axes for each kind of work, a column for each thing that grows."""
    places = [(work, growth.what) for work in (INFERENCE, STEP) for growth in GROWTHS]
    with figure_for(path, (14, 8), rows=2, columns=len(GROWTHS)) as figure:
        for axes, (work, what) in zip(figure.axes, places, strict=True):
            lines = []
            for row in (row for row in rows if (row["work"], row["grows"]) == (work, what)):
                numbers = [float(number) for number in row["numbers"].split()]
                color = f"C{WAYS[INFERENCE].index(row['way'])}"  # the same in all axes
                axes.plot(numbers, [float(ms) for ms in row["milliseconds"].split()], "o", markersize=4, color=color)
                ends, slope = [numbers[0], numbers[-1]], row["slope_microseconds"]
                fitted = [1e-3 * slope * number + row["intercept_milliseconds"] for number in ends]
                style = "--" if row["way"] in (IN_A_ROW, TORCH) else "-"
                lines.append((f"{row['way']}: {slope:,.1f} µs", ends, fitted, style + color))
            draw_lines(axes, lines, f"{work}, for one more {ONE[what]}", what, "milliseconds of CPU time")
            axes.legend(fontsize="x-small")


def test_tensors_modules_and_slots(reports: list[Report], short: bool, once: Any) -> None:
    """All ways take turns, in a process of its own: CPU time is that of a whole process.

    The script checks outputs and gradients before and after.
    """
    report = Report("cost_slopes", CAPTION, TABLE, plot)
    reports.append(report)
    printed = once(printed_by, "cost_slopes", *((SHORT_ROUNDS, SHORT_MOST) if short else (ROUNDS, MOST)))
    timed = [Timed(**each) for each in printed["timed"]]
    assert {each.grows for each in timed} == {growth.what for growth in GROWTHS}
    for work, ways in WAYS.items():
        assert {each.way for each in timed if each.work == work} == {*ways}
    report.rows += rows_of(timed)
    report.notes.append(f"{len(timed[0].seconds[0])} turns for each size.")


def line(way: str, work: str, begin: float, slope: float, grows: str = "tensors") -> Timed:
    """Times that grow by ``slope`` seconds; the second turn of each is disturbed."""
    numbers = [0, 1, 10, 100]
    return Timed(grows, work, way, numbers, [[begin + slope * n, 5.0] for n in numbers])


def test_slopes_are_of_the_fastest_turns_and_beside_torch_and_the_row() -> None:
    others = [line(way, INFERENCE, 1e-3, 1e-6) for way in WAYS[INFERENCE]]  # kinds of work are not mixed
    found = [line(IN_A_ROW, STEP, 1e-3, 2e-6), line(TORCH, STEP, 2e-3, 32e-6), line(WRAPPER, STEP, 3e-3, 8e-6)]
    row = rows_of([*others, *found])[-1]
    assert (row["slope_microseconds"], row["beyond_row_microseconds"]) == pytest.approx((8, 6), rel=1e-3)
    assert row["torch_over_this"] == pytest.approx(4, rel=1e-3)
    assert row["intercept_milliseconds"] == pytest.approx(3, rel=1e-3)
    assert (row["turns"], row["numbers"]) == (2, "0 1 10 100")
