"""Transports and routes beside each other and beside a copy from device to device. All give the same bits.

Buckets have 1 KiB to 32 MiB on simulated devices, up to 1 GiB on accelerators, and 1 to 10,000 tensors.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pairs import PAIRS, SHORT_PAIRS, Comparison, milliseconds, take_turns
from places import Places, device_name, is_simulated, simulator_notes
from plots import draw_lines, figure_for
from reporting import Report, Row
from transports import BROADCAST, SUM, Case, Traffic, copy_between

CAPTION = """\
A bucket of so many KiB and tensors is sent from the first device to all others, or summed over all devices. GB/s counts
the bytes read plus written by the fewest transfers possible: one of the bucket for each device but the first. "of a
copy" is that bandwidth over the bandwidth of one copy of 64 MiB between two of the devices, "star/this" how many times
as fast as the star the row is: medians over the rounds. Simulated devices are no accelerators. Every copy is one within
the CPU's memory, by one core, and no two run at a time. So only the numbers of launches and of bytes show here, and
several links at a time, which routes are for, do not. Clocks were off."""

KIB = 2**10
SIZES = [KIB, 32 * KIB, KIB**2, 32 * KIB**2, KIB**3]
LARGEST_SIMULATED = 32 * KIB**2
COUNTS = [1, 100, 10_000]

TABLE = {
    "work": "{work}",
    "devices": "{devices}, {device}",
    "KiB": lambda row: f"{row['nbytes'] / KIB:,.0f}",
    "tensors": "{tensors:,}",
    "way": "{way}",
    "ms": "{milliseconds:.3f}",
    "GB/s": "{gigabytes_per_second:.2f}",
    "of a copy": "{of_a_copy:.2f}",
    "star/this": "{star_over_this:.2f}",
}


def rows_of(traffic: Traffic, seconds: Sequence[list[float]], copies: list[float], copied: int) -> list[Row]:
    """A row for each way. ``copies`` has the seconds of copies of ``copied`` bytes in the same rounds."""
    by_way = dict(zip(traffic.ways, seconds, strict=True))
    return [
        {
            "work": traffic.case.work,
            "device": device_name(traffic.devices[0]),
            "devices": len(traffic.devices),
            "nbytes": traffic.case.nbytes,
            "tensors": traffic.case.tensors,
            "way": way,
            "milliseconds": milliseconds(own),
            "gigabytes_per_second": traffic.moved / statistics.median(own) / 1e9,
            "of_a_copy": Comparison(own, copies).ratio * traffic.moved / copied,
            "star_over_this": Comparison(own, by_way["star"]).ratio,
        }
        for way, own in by_way.items()
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bandwidth over the size of the bucket, for the most tensors that all sizes have."""
    works = list(dict.fromkeys(row["work"] for row in rows))
    with figure_for(path, (4.5 * len(works), 3.6), columns=len(works)) as figure:
        for axes, work in zip(figure.axes, works, strict=True):
            own = [row for row in rows if row["work"] == work]
            lines = []
            for way in dict.fromkeys(row["way"] for row in own):
                for label, tensors, style in (("1 tensor", 1, "-"), ("100 tensors", 100, "--")):
                    line = [row for row in own if row["way"] == way and row["tensors"] == tensors]
                    sizes = [row["nbytes"] / KIB for row in line]
                    lines.append((f"{way}, {label}", sizes, [row["of_a_copy"] for row in line], style))
            x = f"KiB on each of {own[0]['devices']} devices ({own[0]['device']})"
            draw_lines(axes, lines, work, x, "bandwidth / that of a copy")
            axes.set_xscale("log", base=2)
        figure.axes[0].legend(fontsize="x-small")


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("transports", CAPTION, TABLE, plot, notes=simulator_notes(places)))
    return reports[-1]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size // KIB} KiB")
@pytest.mark.parametrize("work", [BROADCAST, SUM])
def test_ways(work: str, size: int, count: int, report: Report, places: Places, short: bool, once: Any) -> None:
    devices = places.apart_or_skip(2, report)
    if size < 4 * count:
        pytest.skip("fewer numbers than tensors")
    if is_simulated(devices[0]) and size > LARGEST_SIMULATED:
        pytest.skip("for accelerators")
    if short and (size, count) not in ((KIB, 1), (KIB**2, 100)):
        pytest.skip("short")
    traffic = Traffic(Case(work, size, count), devices)
    traffic.check()
    copy, copied = copy_between(*devices[:2])
    with places.clocks_off():
        *seconds, copies = once(take_turns, [*traffic.calls(), copy], SHORT_PAIRS if short else PAIRS)
    report.rows += rows_of(traffic, seconds, copies, copied)
