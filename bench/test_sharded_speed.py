"""A step of a sharded model beside FSDP2, beside single steps of small operators, and with more and more units.

- A GPT of 6 blocks, 256 wide, 16 samples of 64 tokens, AdamW, on two CPU slots and on two simulated devices, beside
  FSDP2 and DDP with two gloo processes each, and beside the model alone. Each has processes of its own
  (`sharded_contender`), and all take turns.
- A GPT of 12 blocks of width 24 on 8 devices, beside the same number of single-device steps in a row.
- GPTs of 3 to 24 blocks of width 24 on 4 devices.

The tests assert that all train in the same way. The bars of the report say what its ratios should be; they fail no
test.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from beside_torch import SETTLE, SHORT_SETTLE
from contender import LENGTH, SAMPLES_PER_SLOT, SLOTS
from cpu_slots import Contender
from gradients import assert_same_gradients
from linear_cost import take_turns_on_the_cpu
from pairs import PAIRS, Comparison, load, take_turns
from places import Places
from reporting import Report
from shapes import NARROW_GPT
from sharded_contender import ALONE, CPU, DDP, FSDP, SHARDED, SIMULATED
from sharded_speed import UNITS, UNITS_DEVICES, Growth, launch_bound, of_blocks
from sharded_speed_report import (
    BESIDE_ALONE,
    BESIDE_DDP,
    BESIDE_FSDP,
    BESIDE_REPLICATE,
    CAPTION,
    OVER_IN_A_ROW,
    OVER_IN_A_ROW_NO_OPTIMIZER,
    UNITS_CAPTION,
    growth,
    plot,
    plot_growth,
    timed,
)
from simulator import simulator_notes

SCRIPT = Path(__file__).with_name("sharded_contender.py")
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Two intra-op threads that wait for each other sleep. Where they do not, and other programs want the cores too, a step
takes several times as long."""
LAUNCH_BOUND_DEVICES = 8
GROWTH_ROUNDS, SHORT_GROWTH_ROUNDS = 8, 2
SHORT_UNITS = UNITS[:2]


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("sharded_speed", CAPTION, plot, notes=simulator_notes(places)))
    return reports[-1]


@pytest.fixture(scope="module")
def units_report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("sharded_units", UNITS_CAPTION, plot_growth, notes=simulator_notes(places)))
    return reports[-1]


def test_beside_fsdp(benchmark: BenchmarkFixture, report: Report, tmp_path: Path, places: Places, short: bool) -> None:
    """All begin with the same gradients, and their losses stay the same, step by step."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch without gloo")
    ranks = {way: [[way, str(rank), str(tmp_path / way)] for rank in range(SLOTS)] for way in (FSDP, DDP)}
    arguments = {CPU: [[CPU]], SIMULATED: [[SIMULATED]], **ranks}
    if not places.simulated:
        del arguments[SIMULATED]
        report.notes.append(f"Rows are missing: {places.why_not_simulated}.")
    with ExitStack() as stack:
        contenders = {
            name: stack.enter_context(Contender(name, own, tmp_path, SCRIPT, **PATIENT))
            for name, own in arguments.items()
        }
        commands = [(name, way) for name in contenders for way in ((name,) if name in ranks else (SHARDED, ALONE))]

        def collect_garbage() -> None:
            for contender in contenders.values():
                contender.collect_garbage()

        def results() -> list[dict[str, Any]]:
            return [contenders[name].saved()[way] for name, way in commands]

        def compare() -> tuple[list[list[float]], tuple[float, float]]:
            before = load()
            calls = [lambda name=name, way=way: contenders[name].tell(way) for name, way in commands]
            return take_turns(calls, PAIRS, between=collect_garbage, short=short), (before, load())

        for name, way in commands:
            contenders[name].tell(way)
        expected, *others = results()
        for other in others:
            assert_same_gradients(other["gradients"], expected["gradients"])
        found, loads = benchmark.pedantic(compare, rounds=1)
        losses = [result["losses"] for result in results()]
        for other in losses[1:]:
            torch.testing.assert_close(other, losses[0], rtol=1e-3, atol=0)
    if benchmark.enabled:
        seconds = dict(zip(commands, found, strict=True))
        model = f"GPT of 6 blocks, width 256, {SLOTS * SAMPLES_PER_SLOT} x {LENGTH} tokens"
        for place, slots in ((CPU, f"{SLOTS} CPU slots"), (SIMULATED, f"{SLOTS} devices")):
            if place not in contenders:
                continue
            ours = seconds[place, SHARDED]
            beside = {BESIDE_FSDP: (FSDP, FSDP), BESIDE_DDP: (DDP, DDP), BESIDE_ALONE: (place, ALONE)}
            for quotient, other in beside.items():
                report.rows.append(timed(model, slots, quotient, Comparison(ours, seconds[other], *loads)))


@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support")
def test_launch_bound(benchmark: BenchmarkFixture, report: Report, places: Places, short: bool) -> None:
    """All take turns, in rounds."""
    devices = places.apart_or_skip(LAUNCH_BOUND_DEVICES, report)[:LAUNCH_BOUND_DEVICES]
    steps = launch_bound(devices)
    beside = {
        OVER_IN_A_ROW: (steps.step, steps.steps_in_a_row),
        OVER_IN_A_ROW_NO_OPTIMIZER: (steps.backward, steps.backward_in_a_row),
        BESIDE_REPLICATE: (steps.step, steps.step_replicated),
    }
    calls = list(dict.fromkeys(call for pair in beside.values() for call in pair))

    def compare() -> tuple[list[list[float]], tuple[float, float]]:
        before = load()
        for _ in range(SHORT_SETTLE if short else SETTLE):  # in which the library chooses its number of permits
            steps.step()
            steps.step_replicated()
        return take_turns(calls, PAIRS, short=short), (before, load())

    steps.check()
    with places.clocks_off():
        found, loads = benchmark.pedantic(compare, rounds=1)
    steps.check()
    if benchmark.enabled:
        seconds = dict(zip(calls, found, strict=True))
        for quotient, (ours, theirs) in beside.items():
            comparison = Comparison(seconds[ours], seconds[theirs], *loads)
            report.rows.append(timed(NARROW_GPT.name, f"{len(devices)} devices", quotient, comparison))


def test_more_units(benchmark: BenchmarkFixture, units_report: Report, places: Places, short: bool) -> None:
    """All sizes have two turns in a round, which goes up the sizes and down again, as in `linear_cost`."""
    devices = places.apart_or_skip(UNITS_DEVICES, units_report)[:UNITS_DEVICES]
    sizes = [Growth(blocks) for blocks in (SHORT_UNITS if short else UNITS)]
    steps = [of_blocks(size.blocks, devices) for size in sizes]
    calls = [call for work in steps for call in (work.step, work.steps_in_a_row)]

    def measure() -> list[list[float]]:
        for work in steps:
            for _ in range(SHORT_SETTLE if short else SETTLE):
                work.step()
        rounds = SHORT_GROWTH_ROUNDS if short else GROWTH_ROUNDS
        return take_turns_on_the_cpu([*calls, *reversed(calls)], rounds)

    for work in steps:
        work.check()
    with places.clocks_off():
        found = benchmark.pedantic(measure, rounds=1)
    for work in steps:
        work.check()
    if benchmark.enabled:
        upwards, downwards = iter(found), reversed(found)
        for size in sizes:
            size.sharded = next(upwards) + next(downwards)
            size.in_a_row = next(upwards) + next(downwards)
        units_report.rows.extend(growth(sizes, len(devices), decided=not short))
