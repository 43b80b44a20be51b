"""From the times of transports and routes to a table and a plot: bandwidths, beside that of one copy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from places import device_name
from plots import figure_for
from reporting import ratios
from transports import Traffic

CAPTION = """\
A bucket of so many KiB and tensors is sent from the first device to all others, or summed over all devices. GB/s counts
the bytes read plus written by the fewest transfers possible: one of the bucket for each device but the first. "of a
copy" is that bandwidth over the bandwidth of one copy of 64 MiB between two of the devices, "star/this" how many times
as fast as the star the row is: medians over the rounds. Simulated devices are no accelerators. Every copy is one within
the CPU's memory, by one core, and no two run at a time. So only the numbers of launches and of bytes show here, and
several links at a time, which routes are for, do not. Clocks were off."""


@dataclass(frozen=True)
class Row:
    """A case by one way."""

    work: str
    device: str
    devices: int
    nbytes: int
    tensors: int
    way: str
    milliseconds: float
    gigabytes_per_second: float
    of_a_copy: float
    star_over_this: float

    def cells(self) -> dict[str, str]:
        return {
            "work": self.work,
            "devices": f"{self.devices}, {self.device}",
            "KiB": f"{self.nbytes / 2**10:,.0f}",
            "tensors": f"{self.tensors:,}",
            "way": self.way,
            "ms": f"{self.milliseconds:.3f}",
            "GB/s": f"{self.gigabytes_per_second:.2f}",
            "of a copy": f"{self.of_a_copy:.2f}",
            "star/this": f"{self.star_over_this:.2f}",
        }


def summarise(traffic: Traffic, seconds: Sequence[Sequence[float]], copies: Sequence[float], copied: int) -> list[Row]:
    """A row for each way. ``copies`` has the seconds of copies of ``copied`` bytes in the same rounds."""
    by_way = dict(zip(traffic.ways, seconds, strict=True))
    case, rows = traffic.case, []
    for way, own in by_way.items():
        rows.append(
            Row(
                work=case.work,
                device=device_name(traffic.devices[0]),
                devices=len(traffic.devices),
                nbytes=case.nbytes,
                tensors=case.tensors,
                way=way,
                milliseconds=1e3 * statistics.median(own),
                gigabytes_per_second=traffic.moved / statistics.median(own) / 1e9,
                of_a_copy=statistics.median(ratios(copies, own)) * traffic.moved / copied,
                star_over_this=statistics.median(ratios(by_way["star"], own)),
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bandwidth over the size of the bucket, for the most tensors that all sizes have."""
    works = list(dict.fromkeys(row.work for row in rows))
    with figure_for(path, (4.5 * len(works), 3.6), columns=len(works)) as figure:
        for axes, work in zip(figure.axes, works, strict=True):
            own = [row for row in rows if row.work == work]
            for way in dict.fromkeys(row.way for row in own):
                for tensors, style in ((1, "-"), (100, "--")):
                    line = [row for row in own if row.way == way and row.tensors == tensors]
                    label = f"{way}, {tensors} tensor{'s' if tensors > 1 else ''}"
                    axes.plot([row.nbytes / 2**10 for row in line], [row.of_a_copy for row in line], style, label=label)
            axes.set_xscale("log", base=2)
            axes.set_title(work)
            axes.set_xlabel(f"KiB on each of {own[0].devices} devices ({own[0].device})")
            axes.set_ylabel("bandwidth / that of a copy")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        figure.axes[0].legend(fontsize="x-small")
