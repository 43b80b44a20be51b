"""A training step on two CPU slots beside one module with the whole batch or its halves, and beside DDP.

A GPT of 6 blocks, 256 wide, 16 samples of 64 tokens. ``DataParallel`` runs in one process with two intra-op threads.
Beside it run, two at a time in turns:

- the module with the whole batch, in the same process, with the same parameters and threads;
- the module with the two halves of the batch one after the other, which is what the split costs by itself;
- ``DistributedDataParallel`` in two processes with gloo, each with one intra-op thread and half of the batch.

All processes are started once. A process whose turn it is not waits for a line on its standard input and takes no time
from the others. Garbage is collected before each step, outside its time.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from contender import LENGTH, SAMPLES_PER_SLOT, SLOTS
from cpu_slots import Contender, memory_of
from cpu_slots_report import CAPTION, Other, summarise
from gradients import assert_same_gradients
from pairs import Comparison, alternate
from reporting import Report

MODULE_BAR = 1.03
DDP_BAR = 1.0
MEMORY_BAR = 0.7
STEPS_BEFORE_MEMORY = 10
SHORT_STEPS_BEFORE_MEMORY = 1


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("cpu_slots", CAPTION))
    return reports[-1]


def test_slots_beside_module_and_ddp(benchmark: BenchmarkFixture, report: Report, tmp_path: Path, short: bool) -> None:
    """All gradients are the same, before and after the timing."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch without gloo")
    ranks = [["1", str(rank), str(tmp_path / "rendezvous")] for rank in range(SLOTS)]
    steps = SHORT_STEPS_BEFORE_MEMORY if short else STEPS_BEFORE_MEMORY

    def memory_after_steps(contender: Contender, command: str) -> int | None:
        for _ in range(steps):
            contender.tell(command)
        return contender.memory()

    with (
        Contender("slots", [[str(SLOTS)]], tmp_path) as ours,
        Contender("ddp", ranks, tmp_path) as ddp,
        # In a short run the module gets no process of its own, because starting processes takes longest.
        Contender("module", [] if short else [[str(SLOTS)]], tmp_path) as module,
    ):
        # Each process makes one kind of step here. Later the process of the slots makes those of the module too.
        memory_of_slots = memory_after_steps(ours, "slots")
        memory_of_ddp = memory_after_steps(ddp, "ddp")
        memory_of_module = None if short else memory_after_steps(module, "module")

        def check() -> None:
            found = []
            for contender, command in ((ours, "slots"), (ours, "module"), (ours, "chunks"), (ddp, "ddp")):
                contender.tell(command)
                found.append(contender.gradients())
            for other in found[1:]:
                assert_same_gradients(found[0], other)

        def collect_garbage() -> None:
            """So that no step pays for the garbage of another."""
            ours.collect_garbage()
            ddp.collect_garbage()

        def compare() -> tuple[Comparison, Comparison, Comparison]:
            def compared(theirs: Contender, command: str, bar: float) -> Comparison:
                return alternate(
                    lambda: ours.tell("slots"),
                    lambda: theirs.tell(command),
                    between=collect_garbage,
                    bar=bar,
                    short=short,
                )

            return (
                compared(ours, "module", MODULE_BAR),
                compared(ours, "chunks", 1.0),
                compared(ddp, "ddp", DDP_BAR),
            )

        check()
        beside_module, beside_chunks, beside_ddp = benchmark.pedantic(compare, rounds=1)
        check()
    if benchmark.enabled:
        others = [
            Other("one module, the whole batch", 1, SLOTS, beside_module, MODULE_BAR, memory_of_module),
            Other("its two halves by hand", 1, SLOTS, beside_chunks, None, None),
            # A short run has not made enough steps to judge memory by.
            Other("DDP, gloo", SLOTS, 1, beside_ddp, DDP_BAR, memory_of_ddp, None if short else MEMORY_BAR),
        ]
        report.rows.extend(summarise(f"DataParallel, {SLOTS} CPU slots", SLOTS, memory_of_slots, others))
        report.notes.append(
            f"GPT of 6 blocks, width 256, {SLOTS * SAMPLES_PER_SLOT} samples of {LENGTH} tokens, forward, loss and "
            f"backward. The processes have the intra-op threads that the table says. {beside_module.pairs} pairs with "
            f"the module, {beside_chunks.pairs} with its halves, {beside_ddp.pairs} with DDP. "
            f"Load of the machine (average of a minute, in processes): {beside_module.load_before:.1f} at the start, "
            f"{beside_ddp.load_after:.1f} at the end."
        )
        if memory_of_slots is None:
            report.notes.append("Memory was not measured: this system has no /proc/PID/smaps.")


HOLDS = """
import sys
held = bytes(range(256)) * int(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holding() -> Iterator[list[subprocess.Popen[str]]]:
    """Four processes. Each of the last two holds 32 MiB more than each of the first two."""
    sizes = [0, 0, 2**17, 2**17]
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", HOLDS, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for size in sizes
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]
    yield processes
    for process in processes:
        process.communicate()


def test_memory_is_what_processes_hold(holding: list[subprocess.Popen[str]]) -> None:
    pids = [process.pid for process in holding]
    one, two, larger = (memory_of(some) for some in (pids[:1], pids[:2], pids[2:]))
    if one is None or two is None or larger is None:
        pytest.skip("this system has no /proc/PID/smaps")
    assert larger - two == pytest.approx(2 * 32 * 2**20, rel=0.02)
    # The pages of the interpreter's files count once.
    assert one < two < 2 * one
