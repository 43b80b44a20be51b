"""A step of a sharded model beside FSDP2, and beside single steps of small operators.

- A GPT of 6 blocks, 256 wide, 16 samples of 64 tokens, AdamW, on two CPU slots and on two simulated devices, beside
  FSDP2 and DDP with two gloo processes each, and beside the model alone. Each has processes of its own
  (`contender`), and all take turns.
- A GPT of 12 blocks of width 24 on 8 devices, beside the same number of single-device steps in a row.

The tests assert that all train in the same way. The bars of the report say what its ratios should be; they fail no
test.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beside_torch import SAMPLES_PER_DEVICE, SETTLE, SHORT_SETTLE
from child_processes import Contender, ranks
from contender import ALONE, DDP, LENGTH, OPTIMIZER, SAMPLES_PER_SLOT, SHARDED, SIMULATED, SLOTS
from contender import FSDP_ONE_MESH as FSDP
from dataparallel.composable import replicate
from dataparallel.forms.unit_choice import units_of
from gradients import assert_same_gradients, mean_square, take_gradients
from pairs import CELLS, PAIRS, Comparison, load, milliseconds, take_turns
from places import Places, simulator_notes
from plots import figure_for
from reporting import Report, Row
from shapes import NARROW_GPT
from sharded_blocks import full, full_gradients, sharded

CAPTION = """\
A training step by composable.fully_shard, which takes turns with the same step by others: forward, loss, backward and
AdamW. It has a unit for each block and one for the rest, or those of units="auto".

fully_shard, the other
    Median milliseconds.
ratio
    The median over the rounds of the quotient that the row names, with its bootstrap 95 % interval.
bar, reached
    What the ratio should be, and whether it is: "not decided" where the bar lies in the interval. Beside FSDP2 the aim
    is 1.5. Rows without a bar are there for context.
FSDP2, DDP
    Two processes with gloo, one intra-op thread in each, half of the batch for each. FSDP2 shards the same blocks. It
    computes on the CPU also where fully_shard has simulated devices.
alone
    The module by itself on one of the devices, with the whole batch.
in a row
    As many steps of the module alone as there are devices, one after the other on one device, each with one device's
    samples.

On CPU slots a process has two intra-op threads, which sleep while they wait for each other (OMP_WAIT_POLICY=PASSIVE).
On simulated devices it has one, because the devices compute at a time.
Simulated devices are no accelerators: all of them compute on the CPU's cores. Their clocks were off."""

BESIDE_FSDP = "FSDP2/fully_shard"
BESIDE_DDP = "DDP/fully_shard"
BESIDE_ALONE = "alone/fully_shard"
BESIDE_REPLICATE = "replicate/fully_shard"
OVER_IN_A_ROW = "fully_shard/in a row"
AT_MOST = {OVER_IN_A_ROW}
BARS = {BESIDE_FSDP: 1.3, OVER_IN_A_ROW: 1.45}
TABLE = {
    "model": "{model}",
    "slots": "{slots}",
    "quotient": "{quotient}",
    "fully_shard": "{fully_shard_ms:.1f}",
    "the other": "{other_ms:.1f}",
    **CELLS,
}

PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Two intra-op threads that wait for each other sleep. Where they do not, and other programs want the cores too, a step
takes several times as long."""
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_MAX_": "0"}
"""All processes keep freed memory, as the allocators of accelerators do: see `places.keep_freed_memory`."""
LAUNCH_BOUND_DEVICES = 8
RATE = 1e-4


class ShardedSteps:
    """A narrow GPT on ``devices``, sharded, replicated and alone, with AdamW. All begin with the same parameters.

    A step in a row is made by the module alone on the first device: as many single steps as there are devices, each
    with one device's samples, and each a whole step.
    """

    def __init__(self, module: nn.Module, batch: Tensor, devices: Sequence[torch.device], by_hand: bool) -> None:
        self.devices = list(devices)
        self.alone = module.to(self.devices[0])
        self.batch = batch.to(self.devices[0])
        model = copy.deepcopy(self.alone)
        self.sharded = sharded(model, self.devices, None if by_hand else units_of(model))
        self.replicated = replicate(copy.deepcopy(self.alone), devices=self.devices)
        networks = (self.alone, self.sharded, self.replicated)
        self._optimizers = {network: torch.optim.AdamW(network.parameters(), lr=RATE) for network in networks}

    def step(self) -> None:
        self._step(self.sharded, self.batch)

    def step_replicated(self) -> None:
        self._step(self.replicated, self.batch)

    def steps_in_a_row(self) -> None:
        for chunk in self.batch.chunk(len(self.devices)):
            self._step(self.alone, chunk)

    def check(self) -> None:
        """Raises `AssertionError` unless the sharded module has the gradients of the module alone.

        The module alone gets the sharded module's parameters, whatever steps the two have made.
        """
        with torch.no_grad():
            for parameter, found in zip(self.alone.parameters(), self.sharded.parameters(), strict=True):
                parameter.copy_(full(found))
        self.alone.zero_grad()
        self.sharded.zero_grad()
        for chunk in self.batch.chunk(len(self.devices)):
            (mean_square(self.alone(chunk)) / len(self.devices)).backward()
        mean_square(self.sharded(self.batch)).backward()
        assert_same_gradients(full_gradients(self.sharded), take_gradients(self.alone), rtol=1e-3, atol=1e-3)
        self.sharded.zero_grad()

    def _step(self, network: nn.Module, batch: Tensor) -> None:
        optimizer = self._optimizers[network]
        optimizer.zero_grad()
        mean_square(network(batch)).backward()
        optimizer.step()


def timed(model: str, slots: str, quotient: str, found: Comparison) -> dict[str, Any]:
    """The times of ``fully_shard`` are the comparison's ``ours``."""
    times = {"fully_shard_ms": milliseconds(found.ours), "other_ms": milliseconds(found.theirs)}
    names = {"model": model, "slots": slots, "quotient": quotient}
    return {**names, **times, **found.row(BARS.get(quotient), quotient in AT_MOST)}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Each ratio with its interval, and its bar."""
    with figure_for(path, (9.5, 0.9 + 0.35 * len(rows))) as figure:
        (axes,) = figure.axes
        for place, row in enumerate(rows):
            axes.plot([row["ratio_low"], row["ratio_high"]], [place, place], color="C0")
            axes.plot(row["ratio"], place, "o", color="C0")
            if row["bar"] is not None:
                axes.plot(row["bar"], place, "|", color="black", markersize=14)
        axes.set_yticks(
            range(len(rows)), [f"{row['quotient']}\n{row['model']}, {row['slots']}" for row in rows], fontsize=7
        )
        axes.invert_yaxis()
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.set_xlabel("ratio with its 95 % interval; black: its bar")
        axes.grid(axis="x", alpha=0.3)


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("sharded_speed", CAPTION, TABLE, plot, notes=simulator_notes(places)))
    return reports[-1]


def test_beside_fsdp(report: Report, tmp_path: Path, places: Places, short: bool, once: Any) -> None:
    """All begin with the same gradients, and their losses stay the same, step by step."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch without gloo")
    one_process = [str(SLOTS), *([SIMULATED] if places.simulated else [])]
    if not places.simulated:
        report.notes.append(f"Rows are missing: {places.why_not_simulated}.")
    variables = PATIENT | KEEPS_MEMORY
    with ExitStack() as stack:
        contenders = {
            (place, way): stack.enter_context(Contender(f"{place} {way}", [[place, way]], tmp_path, **variables))
            for place in one_process
            for way in (SHARDED, ALONE)
        }
        for way in (FSDP, DDP):
            contenders[way, way] = stack.enter_context(ranks(way, tmp_path, [way], SLOTS, **variables))

        def collect_garbage() -> None:
            for contender in contenders.values():
                contender.collect_garbage()

        def results(what: str) -> list[Any]:
            found = [contender.found()[way] for (_, way), contender in contenders.items()]
            if what == "losses":  # each rank has that of its part of the batch
                return [torch.stack([of_rank["losses"] for of_rank in by_rank]).mean(0) for by_rank in found]
            return [by_rank[0]["gradients"] for by_rank in found]

        calls = [partial(contender.tell, way + OPTIMIZER) for (_, way), contender in contenders.items()]
        for call in calls:
            call()
        expected, *others = results("gradients")
        for other in others:
            assert_same_gradients(other, expected)
        before = load()
        found = once(take_turns, calls, PAIRS, between=collect_garbage, short=short)
        loads = before, load()
        losses = results("losses")
        for other in losses[1:]:
            torch.testing.assert_close(other, losses[0], rtol=1e-3, atol=0)
    seconds = dict(zip(contenders, found, strict=True))
    model = f"GPT of 6 blocks, width 256, {SLOTS * SAMPLES_PER_SLOT} x {LENGTH} tokens"
    for place in one_process:
        slots = f"{SLOTS} devices" if place == SIMULATED else f"{SLOTS} CPU slots"
        beside = {BESIDE_FSDP: (FSDP, FSDP), BESIDE_DDP: (DDP, DDP), BESIDE_ALONE: (place, ALONE)}
        for quotient, other in beside.items():
            report.rows.append(
                timed(model, slots, quotient, Comparison(seconds[place, SHARDED], seconds[other], *loads))
            )


@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support")
@pytest.mark.parametrize("units", ["a unit for each block", 'units="auto"'])
def test_launch_bound(report: Report, places: Places, short: bool, once: Any, units: str) -> None:
    """All take turns, in rounds."""
    devices = places.apart_or_skip(LAUNCH_BOUND_DEVICES, report)[:LAUNCH_BOUND_DEVICES]
    batch = NARROW_GPT.batch(SAMPLES_PER_DEVICE * len(devices))
    steps = ShardedSteps(NARROW_GPT.model(), batch, devices, by_hand=units == "a unit for each block")
    beside = {
        OVER_IN_A_ROW: (steps.step, steps.steps_in_a_row),
        BESIDE_REPLICATE: (steps.step, steps.step_replicated),
    }
    calls = list(dict.fromkeys(call for pair in beside.values() for call in pair))
    steps.check()
    before = load()
    with places.clocks_off():
        for _ in range(SHORT_SETTLE if short else SETTLE):
            steps.step()
            steps.step_replicated()
        seconds = dict(zip(calls, once(take_turns, calls, PAIRS, short=short), strict=True))
    loads = before, load()
    steps.check()
    for quotient, (ours, theirs) in beside.items():
        found = Comparison(seconds[ours], seconds[theirs], *loads)
        report.rows.append(timed(f"{NARROW_GPT.name}, {units}", f"{len(devices)} devices", quotient, found))
