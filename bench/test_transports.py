"""Transports and routes beside each other and beside a copy from device to device. All give the same bits.

Buckets have 1 KiB to 32 MiB on simulated devices, up to 1 GiB on accelerators, and 1 to 10,000 tensors.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from pairs import PAIRS, SHORT_PAIRS, take_turns
from places import Places, is_simulated
from reporting import Report
from simulator import simulator_notes
from transports import BROADCAST, SUM, Case, Traffic, copy_between
from transports_report import CAPTION, plot, summarise

KIB = 2**10
SIZES = [KIB, 32 * KIB, KIB**2, 32 * KIB**2, KIB**3]
LARGEST_SIMULATED = 32 * KIB**2
COUNTS = [1, 100, 10_000]


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("transports", CAPTION, plot, notes=simulator_notes(places)))
    return reports[-1]


@pytest.fixture
def devices(places: Places, report: Report) -> list[torch.device]:
    return places.apart_or_skip(2, report)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size // KIB} KiB")
@pytest.mark.parametrize("work", [BROADCAST, SUM])
def test_ways(
    work: str,
    size: int,
    count: int,
    devices: list[torch.device],
    benchmark: BenchmarkFixture,
    report: Report,
    places: Places,
    short: bool,
) -> None:
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
        rounds = SHORT_PAIRS if short else PAIRS
        *seconds, copies = benchmark.pedantic(take_turns, ([*traffic.calls(), copy], rounds), rounds=1)
    if benchmark.enabled:
        report.rows += summarise(traffic, seconds, copies, copied)
