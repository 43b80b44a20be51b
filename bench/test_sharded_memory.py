"""Memory of each device with a sharded model, beside `replicate` and one device: 1, 2, 4 and 8 devices, and options.

A GPT of 8 blocks, 256 wide, 2 samples of 64 tokens for each device, AdamW. What stays between two steps has to be the
device's part of parameters and averages, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from places import Places, simulator_notes
from plots import draw_lines, figure_for
from reporting import Report, Row
from sharded_memory import CAPTION, TABLE, WAYS, WIDE_GPT, Way, measure, row_of


def plot(rows: Sequence[Row], path: Path) -> None:
    """Idle memory on the left and the peak on the right, against the number of devices."""
    peaks = {"idle": ("idle",), "peak of a step": ("forward", "backward", "optimizer")}
    with figure_for(path, (9.5, 3.8), columns=2) as figure:
        for axes, (title, parts) in zip(figure.axes, peaks.items(), strict=True):
            lines = []
            for way in dict.fromkeys(row["way"] for row in rows):
                own = [row for row in rows if row["way"] == way]
                sizes = [max(row[part] for part in parts) / 2**20 for row in own]
                lines.append((way, [row["devices"] for row in own], sizes, "o-"))
            draw_lines(axes, lines, title, "devices", "MiB on the device that has most")
            axes.set_xticks(sorted({row["devices"] for row in rows}))
        figure.axes[0].legend(fontsize="x-small")


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("sharded_memory", CAPTION, TABLE, plot, notes=simulator_notes(places)))
    return reports[-1]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_memory(count: int, way: Way, places: Places, report: Report, short: bool) -> None:
    if not places.simulated:
        pytest.skip(f"only simulated devices count bytes: {places.why_not_simulated}")
    devices = places.simulated[:count]
    if not way.fits(count):
        pytest.skip("not a way to use so many devices")
    if short and count not in (1, 4):
        pytest.skip("short")
    usage = measure(WIDE_GPT, way, devices)
    row = row_of(WIDE_GPT, way, count, usage)
    report.rows.append(row)
    # The parts of this model fill their places: none has padding.
    assert not way.shards or usage.idle == row["expected_idle"]
