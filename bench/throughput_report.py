"""From the throughput of trainings that took turns to a table and a plot of efficiencies.

Does not know what was trained, and measures nothing itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from places import computing_devices, device_name
from plots import figure_for
from reporting import quartiles, ratios

CAPTION = """\
One training on 1 to 8 slots. The whole batch has 128 samples for every number of slots, so 8 slots get 16 each.
Simulated devices are no accelerators: all of them compute on the CPU's cores. Their clocks were off.

samples/s
    The training throughput of the median epoch, which depends on what else the machine did.
efficiency
    The speed-up over one slot on a device of the same kind, divided by the number of devices that compute: 1 is ideal.
    For slots that share a device it shows what scattering, replicating and gathering cost, for several devices how much
    of them arrives as speed. Simulated devices count as one, because they share the CPU. Above 1.00 they only use a
    second core: a device uses one, because torch is limited to one intra-op thread here. The median over the epochs,
    and their middle half.
time/by hand
    The time of an epoch over that of the same chunks one after the other on one device, without the library: what the
    library costs. The rest of the loss is what small chunks cost torch.
test accuracy
    After the whole training. All rows do the same training up to rounding; float32 lets them differ by a few of the
    360 test scans."""


class Run(Protocol):
    """A training. Its epochs took turns with those of the runs that it is compared with."""

    slots: list[torch.device]
    epoch_seconds: list[float]

    @property
    def samples_per_second(self) -> float: ...

    def accuracy(self) -> float: ...


@dataclass(frozen=True)
class Row:
    """One run. Efficiencies are the quartiles over the epochs; 1 is ideal.

    `over_by_hand` is the time of an epoch over that of the same chunks on one device without the library. It is `None`
    where the two do not use the same cores.
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

    def cells(self) -> dict[str, str]:
        return {
            "device": self.device,
            "devices": str(self.devices),
            "slots": str(self.slots),
            "samples/s": f"{self.samples_per_second:,.0f}",
            "efficiency": f"{self.efficiency:.2f}",
            "middle half": f"{self.efficiency_low:.2f} to {self.efficiency_high:.2f}",
            "time/by hand": "" if self.over_by_hand is None else f"{self.over_by_hand:.2f}",
            "test accuracy": f"{self.test_accuracy:.1%}",
        }


def compare(runs: Sequence[Run], by_hand: Mapping[Run, Run]) -> list[Row]:
    """A row per run, measured against the first run of its device type, which has one slot, and against `by_hand`.

    efficiency = speed-up over one slot / number of devices that compute

    So 1 is ideal both for slots that share one device, which have the same work to do as one slot, and for n devices,
    which should be n times as fast. Simulated devices share the CPU. The speed-up is taken epoch by epoch: on a machine
    that does other things too, epochs a second apart can be compared, but whole runs cannot.
    """
    rows = []
    for run in runs:
        one_slot = next(other for other in runs if other.slots[0].type == run.slots[0].type)
        devices = computing_devices(run.slots)
        low, middle, high = quartiles(x / devices for x in ratios(one_slot.epoch_seconds, run.epoch_seconds))
        over_by_hand = None
        if run in by_hand:
            over_by_hand = statistics.median(ratios(run.epoch_seconds, by_hand[run].epoch_seconds))
        rows.append(
            Row(
                device=device_name(run.slots[0]),
                devices=len(set(run.slots)),
                slots=len(run.slots),
                samples_per_second=run.samples_per_second,
                efficiency=middle,
                efficiency_low=low,
                efficiency_high=high,
                over_by_hand=over_by_hand,
                test_accuracy=run.accuracy(),
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """Samples per second and efficiency over the number of slots."""
    with figure_for(path, (9, 3.6), columns=2) as figure:
        speed, efficiency = figure.axes
        for label, series in _series(rows).items():
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
        efficiency.set_ylabel("efficiency (see the table)")
        for axes in (speed, efficiency):
            axes.set_xscale("log", base=2)
            ticks = sorted({row.slots for row in rows})
            axes.set_xticks(ticks, [str(slots) for slots in ticks])
            axes.minorticks_off()
            axes.set_xlabel("slots")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        efficiency.legend(fontsize="small", loc="lower left")


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The lines of the plot, each from one slot on."""
    lines = {}
    for device in dict.fromkeys(row.device for row in rows):
        own = [row for row in rows if row.device == device]
        lines[f"slots share one device ({device})"] = [row for row in own if row.devices == 1]
        lines[f"a device for each slot ({device})"] = [row for row in own if row.devices == row.slots]
    several = {label: line for label, line in lines.items() if len(line) > 1}
    return several or dict(list(lines.items())[:1])
