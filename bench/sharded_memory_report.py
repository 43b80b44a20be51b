"""From bytes on devices to the rows of a table and a picture. Does not know how they were counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plots import figure_for
from sharded_memory import Parts, Usage, Way

CAPTION = """\
Memory in MiB of the device that has most, counted by the simulator to the byte. A training step is forward, backward
and AdamW. The batch itself is not counted.

idle
    Between two steps, with gradients set to None: parameters and two averages of AdamW.
expected idle
    Three times the parameters, divided by the number of devices where they are sharded. Parts of other models have
    padding, of this one none: the width is a multiple of 64.
forward, backward, optimizer
    The largest amount during that part of a step.
expected peak
    The larger of two. In backward: shards of parameters, averages and gradients; the activations of a device's share;
    and what is not sharded. That is the root's weights, two units of weights, and two units of gradients, one of them
    on its way. Without prefetch it is one unit of weights, and the row of gradients that an owner receives. With
    reshard_after_forward=False it is all weights, with 2 half of them more. With no_sync it is all gradients more, and
    for the last two units the sums that are not yet added to gradients, and a row. In the optimizer: five times the
    shard, because its foreach operators have a temporary list. On one device nothing is sharded, so the shard is the
    whole. Units of at most 64 KiB add up to 512 KiB of such units, and the gradients of one from each device.
within
    Whether the peak is at most what is expected. For replicate the formula is that of one device.
received
    What a device gets from others in a step, on the device that gets most. Inputs are not counted.
of an all-reduce
    The same divided by what an all-reduce of the gradients brings to each device: 2 (N - 1) / N of their size. Units
    whose gradients are at most 64 KiB are added on one device, which gets them whole from all others."""

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One model by one way on a number of devices. Sizes are bytes."""

    model: str
    devices: int
    way: str
    idle: int
    expected_idle: int
    forward: int
    backward: int
    optimizer: int
    expected_peak: int
    within: bool
    received: int
    of_all_reduce: float | None

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "model": self.model,
            "devices": str(self.devices),
            "way": self.way,
            "idle": mebibytes(self.idle),
            "expected\nidle": mebibytes(self.expected_idle),
            "forward": mebibytes(self.forward),
            "backward": mebibytes(self.backward),
            "optimizer": mebibytes(self.optimizer),
            "expected\npeak": mebibytes(self.expected_peak),
            "within": "yes" if self.within else "no",
            "received": mebibytes(self.received),
            "of an\nall-reduce": "" if self.of_all_reduce is None else f"{self.of_all_reduce:.2f}",
        }

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward, self.optimizer)


def row(model: str, way: Way, devices: int, parts: Parts, usage: Usage) -> Row:
    """What was used beside what was to be expected."""
    expected = way.peak(parts, devices)
    all_reduce = 2 * (devices - 1) / devices * parts.parameters
    return Row(
        model=model,
        devices=devices,
        way=way.name,
        idle=usage.idle,
        expected_idle=way.idle(parts, devices),
        forward=usage.forward,
        backward=usage.backward,
        optimizer=usage.optimizer,
        expected_peak=expected,
        within=usage.peak <= expected,
        received=usage.received,
        of_all_reduce=usage.received / all_reduce if all_reduce else None,
    )


def described(parts: Parts) -> str:
    """A note with what the formulas were fed with."""
    return (
        f"In MiB: {mebibytes(parts.parameters)} of parameters, {mebibytes(parts.unit)} of them in a unit and "
        f"{mebibytes(parts.root)} in the root; {mebibytes(parts.activations)} of activations of a device's share, "
        "measured on one device."
    )


def mebibytes(size: int) -> str:
    return f"{size / MIB:.2f}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Idle memory on the left and the peak on the right, against the number of devices."""
    with figure_for(path, (9.5, 3.8), columns=2) as figure:
        for axes, title in zip(figure.axes, ("idle", "peak of a step"), strict=True):
            for way in dict.fromkeys(row.way for row in rows):
                own = [row for row in rows if row.way == way]
                sizes = [(row.idle if title == "idle" else row.peak) / MIB for row in own]
                axes.plot([row.devices for row in own], sizes, "o-", markersize=4, label=way)
            axes.set_title(title)
            axes.set_xlabel("devices")
            axes.set_xticks(sorted({row.devices for row in rows}))
            axes.set_ylabel("MiB on the device that has most")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        figure.axes[0].legend(fontsize="x-small")
