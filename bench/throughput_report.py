"""What the benchmark reports: efficiencies of runs that took turns, as a table, CSV and a plot.

Knows nothing of digits, and measures nothing itself.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

import torch


class Run(Protocol):
    """A training whose epochs took turns with those of the runs that it is compared with."""

    slots: list[torch.device]
    epoch_seconds: list[float]

    @property
    def samples_per_second(self) -> float: ...

    def accuracy(self) -> float: ...


@dataclass(frozen=True)
class Row:
    """One run. Efficiencies are the quartiles over the epochs; 1 is ideal.

    `over_by_hand` is the time of an epoch over that of the same chunks without the library; none for several devices.
    """

    device: str
    devices: int
    slots: int
    samples_per_second: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    over_by_hand: float | None
    test_accuracy: float


@dataclass
class Report:
    """Filled by the tests, printed and written when they are through."""

    name: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Everything but the plot, as reStructuredText that is readable as it stands."""
        parts = [environment(), *self.notes]
        if self.rows:
            parts.insert(1, table(self.rows))
        return "\n\n".join(parts) + "\n"

    def write(self, directory: Path) -> None:
        """Writes `name.rst`, `name.csv` and `name.png`."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{self.name}.rst").write_text(self.text(), encoding="utf-8")
        with (directory / f"{self.name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([column.name for column in fields(Row)])
            for row in self.rows:
                values = (getattr(row, column.name) for column in fields(Row))
                writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in values)
        plot(self.rows, directory / f"{self.name}.png")


def compare(runs: Sequence[Run], by_hand: Mapping[int, Run]) -> list[Row]:
    """A row per run, each measured against the first, which has one slot, and against `by_hand` of as many chunks.

    efficiency = speed-up over one slot / number of distinct devices

    so 1 is ideal both for slots that share one device, whose work does not become less by splitting
    it, and for n devices, which should be n times as fast. The speed-up is taken epoch by epoch: on
    a machine that does other things too, epochs a second apart can be compared, whole runs cannot.
    """
    rows = []
    for run in runs:
        devices = len(set(run.slots))
        pairs = zip(runs[0].epoch_seconds, run.epoch_seconds, strict=True)
        low, middle, high = statistics.quantiles(
            (one / several / devices for one, several in pairs), n=4, method="inclusive"
        )
        rows.append(
            Row(
                device=device_name(run.slots[0]),
                devices=devices,
                slots=len(run.slots),
                samples_per_second=run.samples_per_second,
                efficiency=middle,
                efficiency_low=low,
                efficiency_high=high,
                over_by_hand=_over(run, by_hand[len(run.slots)]) if devices == 1 else None,
                test_accuracy=run.accuracy(),
            )
        )
    return rows


def _over(run: Run, other: Run) -> float:
    return statistics.median(a / b for a, b in zip(run.epoch_seconds, other.epoch_seconds, strict=True))


def table(rows: Sequence[Row]) -> str:
    """A simple reStructuredText table."""
    head = ("device", "devices", "slots", "samples/s", "efficiency", "middle half", "time/by hand", "test accuracy")
    lines = [head] + [
        (
            row.device,
            str(row.devices),
            str(row.slots),
            f"{row.samples_per_second:,.0f}",
            f"{row.efficiency:.2f}",
            f"{row.efficiency_low:.2f} to {row.efficiency_high:.2f}",
            "" if row.over_by_hand is None else f"{row.over_by_hand:.2f}",
            f"{row.test_accuracy:.1%}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rule, text[0], rule, *text[1:], rule])


def plot(rows: Sequence[Row], path: Path) -> None:
    """Samples per second and efficiency over the number of slots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, efficiency) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    shared = [row for row in rows if row.devices == 1]
    distinct = [row for row in rows if row.devices > 1]
    for label, series in (
        (f"slots share one device ({rows[0].device})", shared),
        ("a device for each slot", [rows[0], *distinct] if distinct else []),
    ):
        if not series:
            continue
        slots = [row.slots for row in series]
        speed.plot(slots, [row.samples_per_second for row in series], "o-", label=label)
        middle = [row.efficiency for row in series]
        spread = [
            [row.efficiency - row.efficiency_low for row in series],
            [row.efficiency_high - row.efficiency for row in series],
        ]
        efficiency.errorbar(slots, middle, yerr=spread, fmt="o-", capsize=3, label=label)
    efficiency.axhline(1, color="grey", linestyle=":", label="ideal")
    speed.set_ylabel("training samples per second")
    efficiency.set_ylabel("speed-up over one slot / devices")
    for axes in (speed, efficiency):
        axes.set_xscale("log", base=2)
        ticks = sorted({row.slots for row in rows})
        axes.set_xticks(ticks, [str(slots) for slots in ticks])
        axes.minorticks_off()
        axes.set_xlabel("slots")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    efficiency.legend(fontsize="small", loc="lower left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def device_name(device: torch.device) -> str:
    """The product's name where the backend tells it, else the device type."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return name(device) if name else device.type


def environment() -> str:
    """One line on when and with what this was measured."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"Measured on {datetime.date.today().isoformat()} with Python {platform.python_version()}, "
        f"torch {torch.__version__}, {cores} CPU cores, {torch.get_num_threads()} intra-op thread."
    )
