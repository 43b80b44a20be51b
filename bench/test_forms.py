"""A training step by ``composable.replicate`` beside other forms, ``torch.nn.DataParallel``, single steps and DDP.

On 8 devices, where all take turns, and on two CPU slots in processes of their own (see `test_cpu_slots`). A second
table has the memory of 8 simulated devices, and the bytes that they exchange in a step. The tests assert that all do
the same work. The bars of the report say what its ratios should be; they fail no test.
"""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from contender import SLOTS
from cpu_slots import Contender
from forms import ShardedForms
from forms_report import (
    BAR_DEVICES,
    BARS,
    BESIDE_DDP,
    BESIDE_NOT_RESHARDED,
    BESIDE_SHARDED,
    BESIDE_TORCH,
    BESIDE_WRAPPER,
    CAPTION,
    DDP_BAR,
    OVER_IN_A_ROW,
    SHARDED_BESIDE_TORCH,
    held,
    timed,
)
from gradients import assert_same_gradients
from pairs import PAIRS, Comparison, load, pairs_for, take_turns
from places import Places
from reporting import Report
from shapes import NARROW_GPT, RESNET, WIDE_GPT, Shape
from sharded_memory import DEFAULT, NOT_RESHARDED, REPLICATE, WRAPPER, measure, parts_of, work_of
from sharded_memory_report import CAPTION as MEMORY_CAPTION
from sharded_memory_report import row
from simulator import simulator_notes

STEPS_BEFORE_MEMORY, SHORT_STEPS_BEFORE_MEMORY = 10, 1


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("forms", CAPTION, notes=simulator_notes(places)))
    return reports[-1]


@pytest.fixture(scope="module")
def memory_report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("forms_memory", MEMORY_CAPTION, notes=simulator_notes(places)))
    return reports[-1]


@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support")
@pytest.mark.parametrize("shape", [RESNET, NARROW_GPT, WIDE_GPT], ids=lambda shape: shape.name)
def test_on_devices(shape: Shape, benchmark: BenchmarkFixture, places: Places, report: Report, short: bool) -> None:
    """All take turns, in rounds. Sharded forms, which take longest and have no bar, are in half of them."""
    if short and shape is not NARROW_GPT:
        pytest.skip("short")
    devices = places.apart_or_skip(BAR_DEVICES, report)[:BAR_DEVICES]
    forms = ShardedForms(shape, devices)
    in_all = {BESIDE_WRAPPER: forms.train, BESIDE_TORCH: forms.torch_train, OVER_IN_A_ROW: forms.train_in_a_row}
    in_half = {BESIDE_SHARDED: forms.train_sharded, BESIDE_NOT_RESHARDED: forms.train_not_resharded}

    def compare() -> tuple[list[list[float]], tuple[float, float]]:
        before = load()
        with forms.stand_ins.installed():
            forms.settle(short)
            first = take_turns([forms.train_replicated, *in_all.values(), *in_half.values()], PAIRS, short=short)
            second = take_turns([forms.train_replicated, *in_all.values()], PAIRS, short=short)
        return [one + more for one, more in zip_longest(first, second, fillvalue=[])], (before, load())

    with places.clocks_off():
        (ours, *others), loads = benchmark.pedantic(compare, rounds=1)
    forms.check_replicated()
    forms.check_sharded()
    if benchmark.enabled:
        seconds = dict(zip([*in_all, *in_half], others, strict=True))
        pairs = {quotient: (ours, theirs) for quotient, theirs in seconds.items()}
        pairs[SHARDED_BESIDE_TORCH] = seconds[BESIDE_SHARDED], seconds[BESIDE_TORCH]
        for quotient, (first, second) in pairs.items():
            common = min(len(first), len(second))
            comparison = Comparison(first[:common], second[:common], *loads)
            bar = BARS.get((quotient, shape.name))
            report.rows.append(timed(shape.name, f"{len(devices)} devices", quotient, comparison, bar))


@pytest.mark.parametrize("shape", [RESNET, NARROW_GPT, WIDE_GPT], ids=lambda shape: shape.name)
def test_memory_and_bytes(shape: Shape, places: Places, memory_report: Report, short: bool) -> None:
    """Of a step with AdamW, by each form. Its losses have to be those of one device."""
    if short and shape is not NARROW_GPT:
        pytest.skip("short")
    if not places.simulated:
        pytest.skip(f"only simulated devices count bytes: {places.why_not_simulated}")
    devices = places.simulated[:BAR_DEVICES]
    work = work_of(shape)
    parts = parts_of(work, devices[0])
    for way in (WRAPPER, REPLICATE, DEFAULT, NOT_RESHARDED):
        memory_report.rows.append(row(shape.name, way, len(devices), parts, measure(work, way, devices)))


def test_on_cpu_slots(benchmark: BenchmarkFixture, report: Report, tmp_path: Path, short: bool) -> None:
    """In a process of its own, beside as many processes of DDP as there are slots."""
    if short or not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("short" if short else "torch without gloo")
    ranks = [["1", str(rank), str(tmp_path / "rendezvous")] for rank in range(SLOTS)]
    model, slots = "GPT of 6 blocks, width 256", f"{SLOTS} CPU slots"
    with (
        Contender("replicate", [[str(SLOTS)]], tmp_path) as ours,
        Contender("slots", [[str(SLOTS)]], tmp_path) as wrapper,
        Contender("ddp", ranks, tmp_path) as ddp,
    ):
        memory = []
        for contender, command in ((ours, "replicate"), (ddp, "ddp")):
            for _ in range(STEPS_BEFORE_MEMORY):
                contender.tell(command)
            memory.append(contender.memory())

        contenders = {"replicate": ours, "slots": wrapper, "ddp": ddp}

        def collect_garbage() -> None:
            for contender in contenders.values():
                contender.collect_garbage()

        def compare() -> tuple[list[list[float]], tuple[float, float]]:
            before = load()
            calls = [partial(contender.tell, command) for command, contender in contenders.items()]
            return take_turns(calls, pairs_for(DDP_BAR), between=collect_garbage), (before, load())

        (seconds, of_wrapper, of_ddp), loads = benchmark.pedantic(compare, rounds=1)
        assert_same_gradients(ours.gradients(), ddp.gradients())
    if benchmark.enabled:
        report.rows.append(timed(model, slots, BESIDE_WRAPPER, Comparison(seconds, of_wrapper, *loads), 1.0))
        report.rows.append(timed(model, slots, BESIDE_DDP, Comparison(seconds, of_ddp, *loads), DDP_BAR))
        if memory[0] is not None and memory[1] is not None:
            report.rows.append(held(model, slots, memory[0], memory[1], loads))
