"""Compiled replicas beside eager replicas, and beside the same chunks in a row: a training step, and inference.

The GPT and the BERT of width 24 on four CPU slots, two samples of 32 tokens for each, with Inductor. All ways are in
one process and take turns. Outputs and gradients have to be the same, and after the first calls nothing may be compiled
again. The bars of the report say what its ratios should be; they fail no test.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import pytest

from compiled import (
    COMPILED,
    COMPILED_IN_A_ROW,
    EAGER,
    IN_A_ROW,
    REPLICATED,
    WAYS,
    CompiledBesideEager,
    compilations,
    eager_launches,
    given_up,
)
from pairs import CELLS, PAIRS, Comparison, load, milliseconds, take_turns
from places import Places
from reporting import Report, Row
from shapes import NARROW_BERT, NARROW_GPT, Shape

CAPTION = """\
A training step (forward, loss and backward) and inference by replicas that Inductor has compiled, which take turns with
each of the others. "in a row" are the same chunks, one after the other on one device without the library.

ms
    The median.
ms per replica
    The same divided by the number of replicas. On CPU slots all of it is the host's time, kernels included.
beyond its row
    The part of it that is not in the same chunks in a row, compiled where the replicas are: what the library takes of
    the host for each replica.
this/compiled
    The time of the row over that of compiled replicas: the median over the pairs, and its 95 % interval. Above 1,
    compiled replicas are faster.
at least
    The bar, and whether the ratio reaches it: "not decided" where the bar lies in the interval.
launches
    What is launched for a replica: kernels that Inductor has generated and operators that it calls, counted in its
    code for the CPU; or operators that a simulated device runs. A launch on an accelerator costs the host some
    microseconds."""

SLOTS = 4
IN_A_ROW_OF = {COMPILED: COMPILED_IN_A_ROW, REPLICATED: COMPILED_IN_A_ROW, EAGER: IN_A_ROW}
BARS: dict[tuple[bool, str], float] = {(True, EAGER): 1.5, (False, EAGER): 2.5}
"""By whether it is a training step, and by the way."""
TABLE = {
    "model": "{model}",
    "work": "{work}",
    "way": "{way}",
    "ms": "{milliseconds:.1f}",
    "ms per\nreplica": lambda row: f"{row['milliseconds'] / row['replicas']:.2f}",
    "beyond\nits row": lambda row: per_replica(row["beyond_in_a_row"], row),
    "this/compiled": "{ratio:.2f} [{ratio_low:.2f}, {ratio_high:.2f}]",
    "at least": "{bar:g}: {verdict}",
    "launches": "{launches}",
    "load": CELLS["load"],
}


def per_replica(value: float | None, row: Row) -> str:
    return "" if value is None else f"{value / row['replicas']:.2f}"


def rows_of(
    model: str,
    training: bool,
    seconds: Mapping[str, list[float]],
    launches: Mapping[bool, int | None],
    loads: tuple[float, float],
) -> list[Row]:
    """A row for each way. All but that of compiled replicas have a ratio to it.

    ``launches`` are those of a replica, by whether it is compiled.
    """
    rows = []
    for way, own in seconds.items():
        bar, row = BARS.get((training, way)), IN_A_ROW_OF.get(way)
        found = Comparison(seconds[COMPILED], own, *loads).row(bar)
        if way == COMPILED:
            found |= {"ratio": None, "ratio_low": None, "ratio_high": None}
        beyond = None if row is None else statistics.median(map(float.__sub__, own, seconds[row]))
        rows.append(
            {
                "model": model,
                "work": "training step" if training else "inference",
                "way": way,
                "replicas": SLOTS,
                "milliseconds": milliseconds(own),
                "beyond_in_a_row": None if beyond is None else 1e3 * beyond,
                **{name: found[name] for name in ("ratio", "ratio_low", "ratio_high", "bar", "verdict", "pairs")},
                "launches": launches[way in (COMPILED, REPLICATED, COMPILED_IN_A_ROW)],
                "load_before": loads[0],
                "load_after": loads[1],
            }
        )
    return rows


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("compiled", CAPTION, TABLE))
    return reports[-1]


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", [NARROW_GPT, NARROW_BERT], ids=lambda shape: shape.name)
def test_on_cpu_slots(shape: Shape, training: bool, places: Places, report: Report, short: bool, once: Any) -> None:
    if short and (shape is not NARROW_GPT or training):
        pytest.skip("short")
    beside = CompiledBesideEager(shape, SLOTS, training)
    launches = {True: beside.launches_after_fusion(), False: None}
    if places.simulated:
        launches[False] = eager_launches(shape, training, places.simulated[0])
    beside.settle(short)
    beside.check()
    compiled, before = compilations(), load()
    seconds = once(take_turns, [*beside.calls().values()], PAIRS, short=short)
    loads = before, load()
    assert compilations() == compiled
    assert given_up() == {}
    beside.check()
    report.rows += rows_of(shape.name, training, dict(zip(WAYS, seconds, strict=True)), launches, loads)
