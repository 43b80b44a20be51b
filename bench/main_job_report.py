"""The tables and the picture of the main job: the same work by each way to do it, and what memory it takes.

Does not know how the times were taken, and measures nothing itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nogpu.cuda import is_stand_in
from pairs import Comparison
from places import device_name, is_simulated
from plots import figure_for

ONE_DEVICE = "one device"
TORCH = "torch.nn.DataParallel"
WRAPPER = "DataParallel"
REPLICATE = "composable.replicate"
SHARDED = "composable.fully_shard"
WAYS = (ONE_DEVICE, TORCH, WRAPPER, REPLICATE)

CAPTION = """\
How long the same work takes by each way to do it, in milliseconds: less is better. Each number is a median. All ways of
a row take turns, so that whatever else the machine does slows all of them down.

model
    *digits* is a small residual network that learns to read handwritten digits; its row is an epoch of that training,
    optimizer included. The other two have all the layers of the models they are named after, but narrow ones, so that
    little is left but the overhead. A training step is forward, loss and backward. *copy to devices* makes one replica
    of the model for each device, with gradients recorded.
one device
    No wrapper: the parts of the batch one after the other on one device.
torch.nn.DataParallel
    PyTorch's own wrapper, and torch.nn.parallel.replicate for *copy to devices*.
DataParallel, composable.replicate
    This library's wrapper, and its form without a wrapper, whose replicas stay from step to step.
times as fast as torch
    The time of torch.nn.DataParallel divided by that of this library's DataParallel, turn by turn: the median, and in
    brackets where it lies with a confidence of 95 %."""

MEMORY_CAPTION = """\
How much memory of each device a training with AdamW takes, in MiB, on the device that has most: less is better. The
simulator counts every byte. The model is a GPT of 8 blocks, 256 wide, and each device has 2 samples of 64 tokens.

between steps
    Parameters and the state of AdamW.
at most
    The peak during a step: gradients and activations come on top.

composable.fully_shard spreads parameters, gradients and the state of AdamW over the devices, and gathers each block
when it is needed."""

ON_SIMULATED = "The {} devices are simulated."
ON_STAND_IN = (
    "The {} devices are those of a stand-in: this is torch's CUDA build, and its own functions copy between devices, "
    "but a stand-in answers CUDA's and NCCL's functions."
)
ON_THE_CPU = (
    "They compute on the CPU cores of this machine, so no way can be faster than *one device* by more than the number "
    "of cores. The table shows the overhead of each way, not the speed-up on GPUs."
)
STAND_INS = (
    "torch's own copies between devices need CUDA. Plain copies stand in for them, which are {:.0%} to {:.0%} of the "
    "times of torch below."
)


@dataclass(frozen=True)
class Turns:
    """The seconds of one piece of work by each of `WAYS` that can do it; ``copies`` is a part of torch's.

    What the ways took in the same turn has the same place in their lists.
    """

    model: str
    work: str
    seconds: dict[str, list[float]]
    copies: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """Medians of one piece of work in milliseconds; `None` where a way cannot do it."""

    model: str
    work: str
    turns: int
    one_device_ms: float | None
    torch_ms: float | None
    torch_copies_ms: float | None
    data_parallel_ms: float | None
    replicate_ms: float | None
    times_as_fast: float | None
    times_as_fast_low: float | None
    times_as_fast_high: float | None

    def cells(self) -> dict[str, str]:
        faster = ""
        if self.times_as_fast is not None:
            faster = f"{self.times_as_fast:.2f} ({self.times_as_fast_low:.2f} to {self.times_as_fast_high:.2f})"
        return {
            "model": self.model,
            "work": self.work,
            "one\ndevice": rounded(self.one_device_ms),
            "torch.nn.\nDataParallel": rounded(self.torch_ms),
            "DataParallel": rounded(self.data_parallel_ms),
            "composable.\nreplicate": rounded(self.replicate_ms),
            "times as fast\nas torch": faster,
        }

    def by_way(self) -> dict[str, float]:
        """The milliseconds of those ways that can do it."""
        found = zip(WAYS, (self.one_device_ms, self.torch_ms, self.data_parallel_ms, self.replicate_ms), strict=True)
        return {way: milliseconds for way, milliseconds in found if milliseconds is not None}


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of the device that has most, by one way to train on so many devices."""

    way: str
    devices: int
    idle: int
    peak: int

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "way": self.way,
            "devices": str(self.devices),
            "between steps": f"{self.idle / 2**20:.1f}",
            "at most": f"{self.peak / 2**20:.1f}",
        }


def rounded(milliseconds: float | None) -> str:
    """Three digits, or more before the point."""
    if milliseconds is None:
        return ""
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def summarise(turns: Turns) -> Row:
    """The row of one piece of work."""

    def median(seconds: Sequence[float] | None) -> float | None:
        return 1e3 * statistics.median(seconds) if seconds else None

    comparison = Comparison(turns.seconds[WRAPPER], turns.seconds[TORCH]) if TORCH in turns.seconds else None
    return Row(
        model=turns.model,
        work=turns.work,
        turns=len(turns.seconds[WRAPPER]),
        one_device_ms=median(turns.seconds.get(ONE_DEVICE)),
        torch_ms=median(turns.seconds.get(TORCH)),
        torch_copies_ms=median(turns.copies),
        data_parallel_ms=median(turns.seconds[WRAPPER]),
        replicate_ms=median(turns.seconds.get(REPLICATE)),
        times_as_fast=None if comparison is None else comparison.ratio,
        times_as_fast_low=None if comparison is None else comparison.low,
        times_as_fast_high=None if comparison is None else comparison.high,
    )


def where(rows: Sequence[Row], devices: Sequence[torch.device]) -> list[str]:
    """What has to be known about the devices to read the table."""
    distinct, name = len(set(devices)), device_name(devices[0])
    if distinct == 1:
        return [
            f"Measured on {len(devices)} slots on one device, {name}. torch.nn.DataParallel takes no CPU and each "
            "accelerator only once, so its column is empty."
        ]
    if is_stand_in():
        return [f"{ON_STAND_IN.format(distinct)} {ON_THE_CPU}"]
    if not is_simulated(devices[0]):
        return [f"Measured on {distinct} devices, {name}."]
    notes = [f"{ON_SIMULATED.format(distinct)} {ON_THE_CPU}"]
    shares = [row.torch_copies_ms / row.torch_ms for row in rows if row.torch_ms and row.torch_copies_ms]
    return [*notes, STAND_INS.format(min(shares), max(shares))] if shares else notes


def plot(rows: Sequence[Row], path: Path) -> None:
    """A panel for each row of the table, a bar for each way."""
    columns = 4
    lines = -(-len(rows) // columns)
    with figure_for(path, (2.6 * columns, 1.6 * lines + 0.9), lines, columns) as figure:
        for axes in figure.axes[len(rows) :]:
            axes.set_axis_off()
        for axes, row in zip(figure.axes, rows, strict=False):
            by_way = row.by_way()
            for place, (way, milliseconds) in enumerate(by_way.items()):
                bar = axes.barh(place, milliseconds, color=color(way))
                axes.bar_label(bar, [rounded(milliseconds)], padding=3, fontsize="small")
            axes.set_yticks([])
            axes.set_ylim(len(WAYS) - 0.5, -0.5)  # bars of one height in all panels, the first on top
            axes.set_xlim(0, 1.3 * max(by_way.values()))
            axes.set_title(f"{row.model}\n{row.work}", fontsize="medium")
            axes.locator_params(axis="x", nbins=4)
        shown = [way for way in WAYS if any(way in row.by_way() for row in rows)]
        bars = [figure.axes[0].barh(0, 0, color=color(way)) for way in shown]
        figure.legend(bars, shown, loc="outside lower center", ncols=len(shown), fontsize="medium")
        figure.suptitle("milliseconds (less is better)", fontsize="medium")


def color(way: str) -> str:
    return f"C{WAYS.index(way)}"
