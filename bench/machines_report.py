"""From times, bytes and memory of processes that train together to the rows of three tables. Measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from machine_contender import (
    DDP,
    DDP_FP16,
    DDP_UNUSED,
    FSDP_ONE_MESH,
    FSDP_TWO_MESH,
    HYBRID,
    ONE_MESH,
    REPLICATE,
    REPLICATE_FP16,
    TWO_MESH,
)
from pairs import Comparison

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

MIB = 2**20
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


@dataclass(frozen=True)
class Layout:
    """So many processes, and so many slots in each."""

    processes: int
    slots: int


FOUR = Layout(4, 1)
LAYOUTS = {
    REPLICATE: Layout(2, 2),
    HYBRID: Layout(2, 2),
    ONE_MESH: Layout(2, 2),
    TWO_MESH: FOUR,
    DDP: FOUR,
    FSDP_ONE_MESH: FOUR,
    FSDP_TWO_MESH: FOUR,
}


@dataclass(frozen=True)
class TimeRow:
    """One step by ours and by another way. Times are milliseconds."""

    step: str
    ours: str
    other: str
    ours_ms: float
    other_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    pairs: int
    bar: float | None
    verdict: str
    load_before: float
    load_after: float

    def cells(self) -> dict[str, str]:
        return {
            "step": self.step,
            "ours": self.ours,
            "ms": f"{self.ours_ms:.0f}",
            "the other": self.other,
            "ms ": f"{self.other_ms:.0f}",
            "ours/the other": f"{self.ratio:.3f} [{self.ratio_low:.3f}, {self.ratio_high:.3f}]",
            "pairs": str(self.pairs),
            "at most": judged(self.bar, self.verdict),
            "load": f"{self.load_before:.1f} to {self.load_after:.1f}",
        }


def timed(step: str, ours: str, other: str, comparison: Comparison, bar: float | None) -> TimeRow:
    over_theirs = comparison.swapped
    return TimeRow(
        step=step,
        ours=ours,
        other=other,
        ours_ms=1e3 * statistics.median(comparison.ours),
        other_ms=1e3 * statistics.median(comparison.theirs),
        ratio=over_theirs.ratio,
        ratio_low=over_theirs.low,
        ratio_high=over_theirs.high,
        pairs=comparison.pairs,
        bar=bar,
        verdict="" if bar is None else over_theirs.verdict(bar, at_least=False),
        load_before=comparison.load_before,
        load_after=comparison.load_after,
    )


@dataclass(frozen=True)
class BytesRow:
    """What a rank sends in a step by one way, and that over what it sends by another."""

    way: str
    bytes: int
    collectives: int
    of_gradients: float
    beside: str | None
    ratio: float | None
    bar: float | None
    verdict: str

    def cells(self) -> dict[str, str]:
        return {
            "way": self.way,
            "bytes": f"{self.bytes:,}",
            "collectives": str(self.collectives),
            "of gradients": f"{self.of_gradients:.5f}",
            "beside": self.beside or "",
            "ratio": "" if self.ratio is None else f"{self.ratio:.5f}",
            "at most": judged(self.bar, self.verdict),
        }


def bytes_rows(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[BytesRow]:
    """A row for each of `BESIDE` that was counted. ``found`` has what each rank has, by way."""
    sent = {way: max(of_rank["sent"] for of_rank in by_rank) for way, by_rank in found.items()}
    rows = []
    for way, other, bar in BESIDE:
        if way not in found or (other is not None and other not in found):
            continue
        ratio = None if other is None else sent[way] / sent[other]
        gradients = sum(gradient.nbytes for gradient in found[way][0]["whole_gradients"])
        ranks = len(found[way])
        rows.append(
            BytesRow(
                way=way,
                bytes=sent[way],
                collectives=found[way][0]["calls"],
                of_gradients=sent[way] / (2 * (ranks - 1) / ranks * gradients),
                beside=other,
                ratio=ratio,
                bar=bar,
                verdict="" if ratio is None or bar is None else "yes" if ratio <= bar else "no",
            )
        )
    return rows


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of the rank that has most, by one way."""

    way: str
    processes: int
    devices_of_each: int
    parameters: int
    gradients: int
    states: int
    on_a_device: int
    process: float | None
    all_processes: int | None

    def cells(self) -> dict[str, str]:
        return {
            "way": self.way,
            "processes\nx devices": f"{self.processes} x {self.devices_of_each}",
            "parameters": mebibytes(self.parameters),
            "gradients": mebibytes(self.gradients),
            "optimizer": mebibytes(self.states),
            "on a\ndevice": mebibytes(self.on_a_device),
            "process": "not measured" if self.process is None else f"{self.process / MIB:.0f}",
            "all\nprocesses": "not measured" if self.all_processes is None else f"{self.all_processes / MIB:.0f}",
        }


def memory_row(way: str, by_rank: Sequence[Mapping[str, Any]], memory: int | None) -> MemoryRow:
    """``by_rank`` has what each rank has, ``memory`` is that of all processes together."""
    layout = LAYOUTS[way]
    parameters, gradients, states = (
        max(of_rank[name] for of_rank in by_rank) for name in ("parameters", "gradients", "states")
    )
    together = parameters + gradients + states
    return MemoryRow(
        way=way,
        processes=layout.processes,
        devices_of_each=layout.slots,
        parameters=parameters,
        gradients=gradients,
        states=states,
        on_a_device=together if way == REPLICATE else together // layout.slots,
        process=None if memory is None else memory / layout.processes,
        all_processes=memory,
    )


def judged(bar: float | None, verdict: str) -> str:
    return "" if bar is None else f"{bar:g}: {verdict}"


def mebibytes(size: int) -> str:
    return f"{size / MIB:.2f}"
