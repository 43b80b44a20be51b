"""Memory of each device with a sharded model, beside `replicate` and one device: 1, 2, 4 and 8 devices, and options.

A GPT of 8 blocks, 256 wide, 2 samples of 64 tokens for each device, AdamW. Losses have to be those of one device. What
stays between two steps has to be the device's part of parameters and averages, to the byte. That a peak is within its
formula is told by the table, and fails no test.
"""

from __future__ import annotations

import pytest

from places import Places
from reporting import Report
from sharded_memory import SHARDED_WAYS, STATES, WAYS, WIDE_GPT, Parts, Usage, Way, measure, parts_of
from sharded_memory_report import CAPTION, described, plot, row
from simulator import simulator_notes


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("sharded_memory", CAPTION, plot, notes=simulator_notes(places)))
    return reports[-1]


@pytest.fixture(scope="module")
def parts(places: Places, report: Report) -> Parts:
    if not places.simulated:
        pytest.skip(f"only simulated devices count bytes: {places.why_not_simulated}")
    found = parts_of(WIDE_GPT, places.simulated[0])
    report.notes.append(described(found))
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_memory(count: int, way: Way, places: Places, report: Report, parts: Parts, short: bool) -> None:
    devices = places.simulated[:count]
    if not way.fits(count) or (count > 1 and way is WAYS[0]):
        pytest.skip("not a way to use so many devices")
    if short and count not in (1, 4):
        pytest.skip("short")
    usage = measure(WIDE_GPT, way, devices)
    report.rows.append(row(WIDE_GPT.name, way, count, parts, usage))
    if way in SHARDED_WAYS:
        assert_only_shards(usage, parts, count)


def assert_only_shards(usage: Usage, parts: Parts, devices: int) -> None:
    """Raises `AssertionError` unless each device keeps its part of three times the parameters, to the byte.

    The parts of this model fill their places: none has padding.
    """
    assert usage.idle == STATES * parts.parameters // devices
