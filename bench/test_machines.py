"""Several machines, as processes on one: the time of a step, the bytes that it sends, and the memory of each rank.

A GPT of 6 blocks, 256 wide, 16 samples of 64 tokens for all ranks together. ``composable.replicate`` and
``composable.fully_shard`` over a process group stand beside ``DistributedDataParallel`` and FSDP2. All use gloo.

- Times: ours and torch's in two processes each, which take turns. A process whose turn it is not waits for a line on
  its standard input.
- Bytes: counted by a process group around gloo (`counted_group`), in processes of their own that nobody times.
- Memory: on four devices, which are two processes with two slots each, or four processes.

All ranks have to have the same gradients, bit by bit, and those of torch up to rounding. Bars fail no test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from child_processes import ranks
from contender import (
    DDP,
    DDP_FP16,
    DDP_UNUSED,
    FSDP_ONE_MESH,
    FSDP_TWO_MESH,
    HYBRID,
    LENGTH,
    ONE_MESH,
    OPTIMIZER,
    REPLICATE,
    REPLICATE_FP16,
    SAMPLES_PER_SLOT,
    SLOTS,
    TWO_MESH,
)
from gradients import assert_same_gradients
from pairs import CELLS, Comparison, alternate, milliseconds
from reporting import Report, Row

TIMES_CAPTION = """\
A training step (forward, loss, backward) by two processes with gloo on one machine. Each has one CPU slot, one intra-op
thread and half of the batch. Ours and torch's take turns. "with AdamW" has the optimizer's step too.

ours, the other
    Median milliseconds. They include about 0.1 ms for telling the processes what to do.
ours/the other
    The median over the pairs, with its bootstrap 95 % interval. Below 1, ours is faster.
at most
    The bar, and whether the ratio is at or below it: "not decided" where the bar lies in the interval. The row without
    a bar is there for context.

Both processes are on one machine, so bytes travel through the memory of its kernel and not over a network."""

BYTES_CAPTION = """\
What a rank sends in a training step, counted on the process group: each collective counts with what the usual ring
sends, 2 (n - 1) / n of the bytes for an all-reduce over n ranks, and half of that for a gather or a scattered sum. Two
processes, each with one slot.

bytes
    Of the last of several steps.
collectives
    How many there were in that step. They are the sums of the buckets, and small ones: DDP with find_unused_parameters
    sends which parameters were used. So does replicate, and at the beginning of a backward whether all ranks do the
    same.
of gradients
    The bytes over what an all-reduce of all gradients takes in float32.
beside, ratio
    Another row, and the bytes of this row over those of the other.
at most
    What the ratio should be, and whether it is. Beside DDP as it is, the small collectives may add a thousandth."""

MEMORY_CAPTION = """\
The memory of each rank after steps with AdamW, by ways to train on four devices. The devices are slots of the CPU.
replicate, and fully_shard with a process group or a 1-D mesh, take two processes with two slots each; all others four
processes.

parameters, gradients, optimizer
    MiB in each process, added over its devices: what its parameters, their gradients and the state of AdamW take. With
    replicate they are on the first device, and each other device has a copy of the parameters on top. CPU slots share
    that copy.
on a device
    The three together, divided by the devices of the process. With replicate it is what the first device has, which is
    all.
process
    MiB of the process as proportional set size, without sharing with other programs: Python, torch, activations and
    buckets too. The mean over the processes.
all processes
    The same for all of them, which is what one machine needs to run them."""


def at_most(row: Row) -> str:
    return "" if row["bar"] is None else f"{row['bar']:g}: {row['verdict']}"


TIMES_TABLE = {
    "step": "{step}",
    "ours": "{ours}",
    "ms": "{ours_ms:.0f}",
    "the other": "{other}",
    "ms ": "{other_ms:.0f}",
    "ours/the other": "{ratio:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]",
    "pairs": "{pairs}",
    "at most": at_most,
    "load": CELLS["load"],
}
BYTES_TABLE = {
    "way": "{way}",
    "bytes": "{bytes:,}",
    "collectives": "{collectives}",
    "of gradients": "{of_gradients:.5f}",
    "beside": "{beside}",
    "ratio": "{ratio:.5f}",
    "at most": at_most,
}
MEMORY_TABLE = {
    "way": "{way}",
    "processes\nx devices": "{processes} x {devices_of_each}",
    "parameters": "{parameters:.2fMiB}",
    "gradients": "{gradients:.2fMiB}",
    "optimizer": "{states:.2fMiB}",
    "on a\ndevice": "{on_a_device:.2fMiB}",
    "process": "{process:.0fMiB}",
    "all\nprocesses": "{all_processes:.0fMiB}",
}

BAR = 1.1
AT_MOST_DDP, AT_MOST_PLAIN_DDP, HALF = 1.0, 1.001, 0.501
# Each row of bytes: a way, the one beside it, and the bar.
BESIDE: Sequence[tuple[str, str | None, float | None]] = (
    (DDP, None, None),
    (DDP_UNUSED, None, None),
    (REPLICATE, DDP_UNUSED, AT_MOST_DDP),
    (REPLICATE, DDP, AT_MOST_PLAIN_DDP),
    (DDP_FP16, None, None),
    (REPLICATE_FP16, REPLICATE, HALF),
    (REPLICATE_FP16, DDP_FP16, AT_MOST_PLAIN_DDP),
    (FSDP_ONE_MESH, None, None),
    (ONE_MESH, FSDP_ONE_MESH, AT_MOST_PLAIN_DDP),
)

LAYOUTS = {
    REPLICATE: (2, 2),
    HYBRID: (2, 2),
    ONE_MESH: (2, 2),
    TWO_MESH: (4, 1),
    DDP: (4, 1),
    FSDP_ONE_MESH: (4, 1),
    FSDP_TWO_MESH: (4, 1),
}
"""How many processes a way takes, and slots in each."""

STEPS_BEFORE_COUNTING = 3  # in the second step DDP, and so do we, changes the order of buckets
STEPS_BEFORE_MEMORY, SHORT_STEPS_BEFORE_MEMORY = 10, 1
MODEL = f"GPT of 6 blocks, width 256, {SLOTS * SAMPLES_PER_SLOT} samples of {LENGTH} tokens for all ranks together."

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)

Found = dict[str, list[dict[str, Any]]]


def timed(step: str, ours: str, other: str, found: Comparison, bar: float | None) -> Row:
    times = {"ours_ms": milliseconds(found.ours), "other_ms": milliseconds(found.theirs)}
    row = {"step": step, "ours": ours, "other": other, **times, **found.row(bar, at_most=True)}
    return {name: value for name, value in row.items() if name != "at_most"}


def bytes_rows(found: Found) -> list[Row]:
    """A row for each of `BESIDE`. ``found`` has what each rank has, by way."""
    sent = {way: max(of_rank["sent"] for of_rank in by_rank) for way, by_rank in found.items()}
    rows = []
    for way, other, bar in BESIDE:
        first, count = found[way][0], len(found[way])
        gradients = sum(gradient.nbytes for gradient in first["gradients"])
        ratio = None if other is None else sent[way] / sent[other]
        rows.append(
            {
                "way": way,
                "bytes": sent[way],
                "collectives": first["calls"],
                "of_gradients": sent[way] / (2 * (count - 1) / count * gradients),
                "beside": other,
                "ratio": ratio,
                "bar": bar,
                "verdict": "" if ratio is None or bar is None else "yes" if ratio <= bar else "no",
            }
        )
    return rows


def memory_row(way: str, by_rank: Sequence[Mapping[str, Any]], memory: int | None) -> Row:
    """Bytes of the rank that has most. ``memory`` is that of all processes together."""
    processes, slots = LAYOUTS[way]
    parameters, gradients, states = (
        max(of_rank[name] for of_rank in by_rank) for name in ("parameters", "gradients_held", "states")
    )
    together = parameters + gradients + states
    return {
        "way": way,
        "processes": processes,
        "devices_of_each": slots,
        "parameters": parameters,
        "gradients": gradients,
        "states": states,
        "on_a_device": together if way == REPLICATE else together // slots,
        "process": None if memory is None else memory / processes,
        "all_processes": memory,
    }


def report_of(reports: list[Report], name: str, caption: str, cells: Mapping[str, Any]) -> Report:
    reports.append(Report(name, caption, cells, notes=[MODEL]))
    return reports[-1]


@pytest.fixture(scope="module")
def times(reports: list[Report]) -> Report:
    return report_of(reports, "machines", TIMES_CAPTION, TIMES_TABLE)


@pytest.fixture(scope="module")
def memories(reports: list[Report]) -> Report:
    return report_of(reports, "machines_memory", MEMORY_CAPTION, MEMORY_TABLE)


@pytest.mark.parametrize(
    ("ours", "theirs", "bar"),
    [(REPLICATE, DDP, BAR), (ONE_MESH, FSDP_ONE_MESH, None)],
    ids=["replicate beside DDP", "fully_shard beside FSDP2"],
)
def test_times(ours: str, theirs: str, bar: float | None, times: Report, tmp_path: Path, short: bool) -> None:
    """First without the optimizer, then with it. Gradients are compared before and after the first."""
    if short and ours is not REPLICATE:
        pytest.skip("short")
    with ranks("ours", tmp_path, [ours]) as mine, ranks("torch", tmp_path, [theirs]) as others:

        def check() -> None:
            mine.tell(ours)
            others.tell(theirs)
            assert_same_gradients(mine.found()[ours][0]["gradients"], others.found()[theirs][0]["gradients"])

        def collect_garbage() -> None:
            """So that no step pays for the garbage of another."""
            mine.collect_garbage()
            others.collect_garbage()

        for step, optimizer in (("no optimizer", ""), ("with AdamW", OPTIMIZER)):
            check()
            calls = partial(mine.tell, ours + optimizer), partial(others.tell, theirs + optimizer)
            found = alternate(*calls, between=collect_garbage, bar=bar, short=short)
            times.rows.append(timed(step, ours, theirs, found, bar))


def test_bytes(reports: list[Report], tmp_path: Path) -> None:
    """A short run counts as a long one does: counts are the same in every step.

    DDP with two ranks sends each gradient once: half of it to be added, half of it when it is added.
    """

    def counted(name: str, ways: list[str]) -> Found:
        with ranks(name, tmp_path, ways, counted=True) as contender:
            for way in ways * STEPS_BEFORE_COUNTING:
                contender.tell(way)
            return contender.found()

    found = counted("ours", [REPLICATE, REPLICATE_FP16, ONE_MESH])
    expected = counted("torch", [DDP, DDP_UNUSED, DDP_FP16, FSDP_ONE_MESH])
    assert all(of_rank["sent"] == sum(grad.nbytes for grad in of_rank["gradients"]) for of_rank in expected[DDP])
    for mine, theirs in ((REPLICATE, DDP), (REPLICATE, DDP_UNUSED), (ONE_MESH, FSDP_ONE_MESH)):
        assert_same_gradients(found[mine][0]["gradients"], expected[theirs][0]["gradients"])
    report_of(reports, "machines_bytes", BYTES_CAPTION, BYTES_TABLE).rows += bytes_rows(found | expected)


@pytest.mark.parametrize("way", LAYOUTS)
def test_memory(way: str, memories: Report, tmp_path: Path, short: bool) -> None:
    if short and way not in (REPLICATE, DDP):
        pytest.skip("short")
    with ranks("memory", tmp_path, [way], *LAYOUTS[way]) as contender:
        for _ in range(SHORT_STEPS_BEFORE_MEMORY if short else STEPS_BEFORE_MEMORY):
            contender.tell(way + OPTIMIZER)
        memory = contender.memory()
        found = contender.found()[way]
    memories.rows.append(memory_row(way, found, memory))
    if memory is None:
        memories.notes.append("Memory of processes was not measured: this system has no /proc/PID/smaps.")
