"""From times of sharded steps to the rows of two tables and their pictures. Measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linear_cost_report import R_SQUARED_BAR, fitted
from pairs import Comparison, Verdict
from plots import figure_for
from sharded_speed import Growth

CAPTION = """\
A training step by composable.fully_shard, which takes turns with the same step by others. All but the rows "no
optimizer" are forward, loss, backward and AdamW.

fully_shard, the other
    Median milliseconds.
ratio
    The median over the rounds of the quotient that the row names, with its bootstrap 95 % interval.
bar, reached
    What the ratio should be, and whether it is: "not decided" where the bar lies in the interval. Beside FSDP2 the aim
    is 1.5. Rows without a bar are there for context.
FSDP2, DDP
    Two processes with gloo, one intra-op thread in each, half of the batch for each. FSDP2 shards the same blocks. It
    computes on the CPU also where fully_shard has simulated devices.
alone
    The module by itself on one of the devices, with the whole batch.
in a row
    As many steps of the module alone as there are devices, one after the other on one device, each with one device's
    samples. With "no optimizer" the chunks' gradients are added.

On CPU slots a process has two intra-op threads, which sleep while they wait for each other (OMP_WAIT_POLICY=PASSIVE).
On simulated devices it has one, because the devices compute at a time.
Simulated devices are no accelerators: all of them compute on the CPU's cores. Their clocks were off."""

UNITS_CAPTION = """\
CPU time of all threads of the process for a step of a GPT of width 24 with more and more blocks, each of them a unit,
and a straight line through the fastest turn of each size, by ordinary least squares. AdamW included; simulated devices,
their clocks off.

work
    fully_shard is a sharded step on the devices. "in a row" are as many steps of the module alone, one after the other
    on one device, each with one device's samples.
ms for one more
    The slope of the line: one more block.
R²
    The share of the variance that the line explains. Near 1 nothing grows faster than linearly."""

BESIDE_FSDP = "FSDP2/fully_shard"
BESIDE_DDP = "DDP/fully_shard"
BESIDE_ALONE = "alone/fully_shard"
BESIDE_REPLICATE = "replicate/fully_shard"
OVER_IN_A_ROW = "fully_shard/in a row"
OVER_IN_A_ROW_NO_OPTIMIZER = "fully_shard/in a row, no optimizer"
AT_MOST = {OVER_IN_A_ROW, OVER_IN_A_ROW_NO_OPTIMIZER}
BARS = {BESIDE_FSDP: 1.3, OVER_IN_A_ROW: 1.8}


@dataclass(frozen=True)
class Row:
    """One quotient of one model on some slots."""

    model: str
    slots: str
    quotient: str
    fully_shard_ms: float
    other_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    pairs: int
    bar: float | None
    at_most: bool
    verdict: Verdict | None
    load_before: float
    load_after: float

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "model": self.model,
            "slots": self.slots,
            "quotient": self.quotient,
            "fully_shard": f"{self.fully_shard_ms:.1f}",
            "the other": f"{self.other_ms:.1f}",
            "ratio": f"{self.ratio:.2f}",
            "95 % interval": f"{self.ratio_low:.2f} to {self.ratio_high:.2f}",
            "pairs": str(self.pairs),
            "bar": "" if self.bar is None else f"{'at most' if self.at_most else 'at least'} {self.bar:g}",
            "reached": self.verdict or "",
            "load": f"{self.load_before:.1f} to {self.load_after:.1f}",
        }


def timed(model: str, slots: str, quotient: str, comparison: Comparison) -> Row:
    """The times of ``fully_shard`` are the comparison's ``ours``."""
    at_most, bar = quotient in AT_MOST, BARS.get(quotient)
    judged = comparison.swapped if at_most else comparison
    return Row(
        model=model,
        slots=slots,
        quotient=quotient,
        fully_shard_ms=1e3 * statistics.median(comparison.ours),
        other_ms=1e3 * statistics.median(comparison.theirs),
        ratio=judged.ratio,
        ratio_low=judged.low,
        ratio_high=judged.high,
        pairs=judged.pairs,
        bar=bar,
        at_most=at_most,
        verdict=None if bar is None else judged.verdict(bar, not at_most),
        load_before=comparison.load_before,
        load_after=comparison.load_after,
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Each ratio with its interval, and its bar."""
    with figure_for(path, (9.5, 0.9 + 0.35 * len(rows))) as figure:
        (axes,) = figure.axes
        for place, row in enumerate(rows):
            axes.plot([row.ratio_low, row.ratio_high], [place, place], color="C0")
            axes.plot(row.ratio, place, "o", color="C0")
            if row.bar is not None:
                axes.plot(row.bar, place, "|", color="black", markersize=14)
        axes.set_yticks(range(len(rows)), [f"{row.quotient}\n{row.model}, {row.slots}" for row in rows], fontsize=7)
        axes.invert_yaxis()
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.set_xlabel("ratio with its 95 % interval; black: its bar")
        axes.grid(axis="x", alpha=0.3)


@dataclass(frozen=True)
class GrowthRow:
    """One kind of work with a growing number of blocks. `blocks` and `milliseconds` are the points."""

    work: str
    devices: int
    blocks: str
    milliseconds: str
    slope_milliseconds: float
    intercept_milliseconds: float
    r_squared: float
    within_bar: str
    turns: int

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "work": self.work,
            "devices": str(self.devices),
            "blocks": self.blocks.replace(" ", ", "),
            "ms": self.milliseconds.replace(" ", ", "),
            "ms for one more": f"{self.slope_milliseconds:.2f}",
            "line begins at, ms": f"{self.intercept_milliseconds:.2f}",
            "R²": f"{self.r_squared:.4f}",
            f"at least {R_SQUARED_BAR}": self.within_bar,
        }

    def points(self) -> tuple[list[float], list[float]]:
        return [float(number) for number in self.blocks.split()], [float(ms) for ms in self.milliseconds.split()]


def growth(sizes: Sequence[Growth], devices: int, decided: bool) -> list[GrowthRow]:
    """A row for each kind of work. Unless ``decided``, there were too few turns to judge by the bar."""
    rows = []
    blocks = [size.blocks for size in sizes]
    for work, seconds in (
        ("fully_shard", [size.sharded for size in sizes]),
        ("in a row", [size.in_a_row for size in sizes]),
    ):
        fastest = [1e3 * min(turns) for turns in seconds]  # whatever else the machine does only adds to the time
        line = fitted(blocks, fastest)
        verdict = "yes" if line.r_squared >= R_SQUARED_BAR else "no"
        rows.append(
            GrowthRow(
                work=work,
                devices=devices,
                blocks=" ".join(map(str, blocks)),
                milliseconds=" ".join(f"{ms:.4g}" for ms in fastest),
                slope_milliseconds=line.slope,
                intercept_milliseconds=line.intercept,
                r_squared=line.r_squared,
                within_bar=verdict if decided else "not decided",
                turns=len(seconds[0]),
            )
        )
    return rows


def plot_growth(rows: Sequence[GrowthRow], path: Path) -> None:
    with figure_for(path, (6, 3.8)) as figure:
        (axes,) = figure.axes
        for row in rows:
            blocks, milliseconds = row.points()
            (points,) = axes.plot(blocks, milliseconds, "o", markersize=4, label=row.work)
            x = np.asarray([0, blocks[-1]])
            label = f"{row.slope_milliseconds:.2f} ms each, R² {row.r_squared:.4f}"
            y = row.slope_milliseconds * x + row.intercept_milliseconds
            axes.plot(x, y, color=points.get_color(), linewidth=1, label=label)
        axes.set_xlabel("blocks")
        axes.set_ylabel("milliseconds of CPU time")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
