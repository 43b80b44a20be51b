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

from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from contender import LENGTH, SAMPLES_PER_SLOT, SLOTS
from machine_contender import (
    DDP,
    DDP_FP16,
    DDP_UNUSED,
    FSDP_ONE_MESH,
    ONE_MESH,
    OPTIMIZER,
    REPLICATE,
    REPLICATE_FP16,
)
from machines import STEPS_BEFORE_COUNTING, assert_same, of_ranks, ranks
from machines_report import (
    BYTES_CAPTION,
    LAYOUTS,
    MEMORY_CAPTION,
    TIMES_CAPTION,
    bytes_rows,
    memory_row,
    timed,
)
from pairs import Comparison, alternate
from reporting import Report

BAR = 1.1
STEPS_BEFORE_MEMORY, SHORT_STEPS_BEFORE_MEMORY = 10, 1
MODEL = f"GPT of 6 blocks, width 256, {SLOTS * SAMPLES_PER_SLOT} samples of {LENGTH} tokens for all ranks together."

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)


def reported(reports: list[Report], name: str, caption: str) -> Report:
    reports.append(Report(name, caption, notes=[MODEL]))
    return reports[-1]


@pytest.mark.parametrize(
    ("ours", "theirs", "bar"),
    [(REPLICATE, DDP, BAR), (ONE_MESH, FSDP_ONE_MESH, None)],
    ids=["replicate beside DDP", "fully_shard beside FSDP2"],
)
def test_times(
    ours: str,
    theirs: str,
    bar: float | None,
    benchmark: BenchmarkFixture,
    times: Report,
    tmp_path: Path,
    short: bool,
) -> None:
    """First without the optimizer, then with it. Gradients are compared before and after the first."""
    if short and ours is not REPLICATE:
        pytest.skip("short")
    with ranks("ours", tmp_path, [ours]) as mine, ranks("torch", tmp_path, [theirs]) as others:

        def check() -> None:
            for contender, way in ((mine, ours), (others, theirs)):
                contender.tell(way)
            assert_same(of_ranks(mine)[ours][0], of_ranks(others)[theirs][0])

        def collect_garbage() -> None:
            """So that no step pays for the garbage of another."""
            mine.collect_garbage()
            others.collect_garbage()

        def compared(optimizer: str) -> Comparison:
            return alternate(
                lambda: mine.tell(ours + optimizer),
                lambda: others.tell(theirs + optimizer),
                between=collect_garbage,
                bar=bar,
                short=short,
            )

        def compare() -> dict[str, Comparison]:
            found = {"no optimizer": compared("")}
            check()
            return found | {"with AdamW": compared(OPTIMIZER)}

        check()
        comparisons = benchmark.pedantic(compare, rounds=1)
    if benchmark.enabled:
        times.rows.extend(timed(step, ours, theirs, found, bar) for step, found in comparisons.items())


@pytest.fixture(scope="module")
def times(reports: list[Report]) -> Report:
    return reported(reports, "machines", TIMES_CAPTION)


def test_bytes(reports: list[Report], tmp_path: Path) -> None:
    """A short run counts as a long one does: counts are the same in every step.

    DDP with two ranks sends each gradient once: half of it to be added, half of it when it is added.
    """
    report = reported(reports, "machines_bytes", BYTES_CAPTION)

    def counted(name: str, ways: list[str]) -> dict[str, list[dict[str, Any]]]:
        with ranks(name, tmp_path, ways, counted=True) as contender:
            for way in ways * STEPS_BEFORE_COUNTING:
                contender.tell(way)
            return of_ranks(contender)

    found = counted("ours", [REPLICATE, REPLICATE_FP16, ONE_MESH])
    expected = counted("torch", [DDP, DDP_UNUSED, DDP_FP16, FSDP_ONE_MESH])
    assert all(of_rank["sent"] == sum(grad.nbytes for grad in of_rank["whole_gradients"]) for of_rank in expected[DDP])
    for mine, theirs in ((REPLICATE, DDP), (REPLICATE, DDP_UNUSED), (ONE_MESH, FSDP_ONE_MESH)):
        assert_same(found[mine][0], expected[theirs][0])
    report.rows.extend(bytes_rows(found | expected))


@pytest.fixture(scope="module")
def memories(reports: list[Report]) -> Report:
    return reported(reports, "machines_memory", MEMORY_CAPTION)


@pytest.mark.parametrize("way", LAYOUTS)
def test_memory(way: str, memories: Report, tmp_path: Path, short: bool) -> None:
    if short and way not in (REPLICATE, DDP):
        pytest.skip("short")
    layout = LAYOUTS[way]
    with ranks("memory", tmp_path, [way], layout.processes, layout.slots) as contender:
        for _ in range(SHORT_STEPS_BEFORE_MEMORY if short else STEPS_BEFORE_MEMORY):
            contender.tell(way + OPTIMIZER)
        memory = contender.memory()
        found = of_ranks(contender)[way]
    memories.rows.append(memory_row(way, found, memory))
    if memory is None:
        memories.notes.append("Memory of processes was not measured: this system has no /proc/PID/smaps.")
