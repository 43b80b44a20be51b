"""What `dataparallel.trace` costs: steps with it and without it take turns. And how much of a step it explains.

Asserted is only that the exclusive times of each trace are the time of its block, by another clock, within 5 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pairs import PAIRS, SHORT_PAIRS, Comparison, alternate
from places import Places, device_name
from reporting import Report
from traced import Traced, digits, gpt, seconds_of_a_range

SLOTS = 4
CHOOSING = 10
"""Blocks before, in which the library chooses how many replicas run at a time."""

CAPTION = """\
traced/not is the time of the same steps inside of a trace over that outside: the median over pairs that take turns, and
its 95 % interval. Making tables or pictures is not in it. records are the ranges, waits, copies and gradients that a
block recorded in all threads, and ms the time of the block without a trace. not explained is the part of a block, by
another clock, that the exclusive times of the caller's stages do not add up to: the largest of all blocks."""


@dataclass(frozen=True)
class Row:
    """A training on some slots."""

    work: str
    device: str
    slots: int
    steps: int
    block_ms: float
    records: int
    traced_over_not: float
    low: float
    high: float
    pairs: int
    not_explained: float
    load_before: float
    load_after: float

    def cells(self) -> dict[str, str]:
        return {
            "work": self.work,
            "device": self.device,
            "slots": str(self.slots),
            "steps": str(self.steps),
            "ms": f"{self.block_ms:.1f}",
            "records": str(self.records),
            "traced/not": f"{self.traced_over_not:.3f}",
            "95 % interval": f"{self.low:.3f} to {self.high:.3f}",
            "not explained": f"{100 * self.not_explained:.2f} %",
            "load": f"{self.load_before:.1f} to {self.load_after:.1f}",
        }


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("trace", CAPTION))
    return reports[-1]


def works(places: Places) -> dict[str, partial[Traced]]:
    """Each on CPU slots or accelerators, and on simulated devices."""
    found: dict[str, partial[Traced]] = {}
    for kind, devices in (("real", places.real), ("simulated", places.simulated)):
        if devices:
            slots = [devices[slot % len(devices)] for slot in range(SLOTS)]
            found[f"digits {kind}"] = partial(digits, slots)
            for form in ("DataParallel", "replicate", "fully_shard"):
                found[f"{form} {kind}"] = partial(gpt, form, slots)
    return found


@pytest.mark.parametrize("kind", ["real", "simulated"])
@pytest.mark.parametrize("work", ["digits", "DataParallel", "replicate", "fully_shard"])
def test_cost(work: str, kind: str, benchmark: BenchmarkFixture, places: Places, report: Report, short: bool) -> None:
    """Results are made between the calls, outside of what is timed."""
    make = works(places).get(f"{work} {kind}")
    if make is None:
        pytest.skip(places.why_not_simulated)
    if short and (work, kind) not in (("digits", "real"), ("fully_shard", "simulated")):
        pytest.skip("short")
    training = make()
    for _ in range(1 if short else CHOOSING):
        training.untraced()

    def read() -> None:
        if len(training.found) < len(training.clocked):
            training.read()

    def compare() -> Comparison:
        return alternate(training.untraced, training.traced, 2 * PAIRS, between=read, bar=1.0, short=short)

    with places.clocks_off():
        comparison = benchmark.pedantic(compare, rounds=1)
    read()
    assert len(training.found) >= SHORT_PAIRS
    assert training.uncounted < 0.05
    if benchmark.enabled:
        last = training.found[-1]
        report.rows.append(
            Row(
                work=training.name,
                device=device_name(training.slots[0]),
                slots=len(training.slots),
                steps=last.steps,
                block_ms=1e3 * sorted(comparison.ours)[comparison.pairs // 2],
                records=last.records,
                traced_over_not=comparison.ratio,
                low=comparison.low,
                high=comparison.high,
                pairs=comparison.pairs,
                not_explained=training.uncounted,
                load_before=comparison.load_before,
                load_after=comparison.load_after,
            )
        )


def test_a_range_that_nobody_records(report: Report) -> None:
    """It is too short to be seen in a step."""
    seconds = seconds_of_a_range()
    report.notes.append(f"A range that nobody records takes {1e9 * seconds:.0f} ns.")
