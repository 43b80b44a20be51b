"""`counted`: what a program asks of CUDA, for tests of a steady state.

Launches and bytes are counted as for simulated devices. The calls of CUDA, contexts and host waits are counted by the
stand-in's runtime, all the time and for the whole process; this file takes the differences of two readings. The line of
each host wait is kept only while a block is open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nogpu import shared
from nogpu.cuda import libraries
from nogpu.cuda.watching import compiled, index_of

ALLOCATING = ("cudaMalloc", "cudaMallocPitch", "cudaMallocAsync", "cuMemAlloc_v2", "cuMemCreate")
FREEING = ("cudaFree", "cudaFreeAsync", "cuMemFree_v2", "cuMemRelease")
MAKING_STREAMS = (
    "cudaStreamCreate",
    "cudaStreamCreateWithFlags",
    "cudaStreamCreateWithPriority",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
)


@dataclass(frozen=True)
class HostWait:
    """A wait of the host for a device.

    Attributes:
        call: the function of CUDA that waits, or the operator whose result depends on values.
        file: where the line of Python is: the innermost one outside of torch and of this package's testing tools. Empty
            where no Python runs, and where torch's allocator frees memory.
        line: its number.
        function: its function.
    """

    call: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        if not self.file:
            return f"{self.call}, in no line of Python (a thread of torch's, or its allocator that frees memory)"
        return f"{self.call} in {self.function}, {self.file}:{self.line}"


@contextmanager
def counted() -> Iterator[CudaCounts]:
    """Counts what the whole process, all threads, asks of CUDA while inside.

    Blocks may be nested, and several threads may be inside: each block counts everything that happens. Launches and
    copied bytes are those of `torch.sim.counted`.

    Yields:
        `CudaCounts`. Inside the block they are the counts so far; after it they stay.
    """
    compiled().keep_lines(True)
    try:
        with shared.counting(CudaCounts()) as result:
            yield result
    finally:
        compiled().keep_lines(False)


@dataclass(frozen=True)
class _Reading:
    calls: Counter[str]
    contexts: list[int]
    host_waits: list[HostWait]
    in_graphs: list[int]


class CudaCounts(shared.Counts):
    """What has been counted since `counted` was entered, until its end or, inside the block, until now.

    Besides what it has of `torch.sim.counted` (``launches``, ``copied``, ``sent``, ``received``):

    Attributes:
        calls: how often each function of CUDA was called.
        host_waits: the waits of the host, in their order. A call counts if there is nothing to wait for, too.
        allocations: calls that take memory of a device, such as ``cudaMalloc``.
        frees: calls that give it back, such as ``cudaFree``.
        new_streams: streams that were made. torch makes them for a device at its first use.
        in_graphs: for each device, how many of its ``launches`` were in graphs. The host has not made these one by one.
        new_contexts: the indices of devices that have a context now, and had none before.
    """

    def __init__(self) -> None:
        super().__init__(compiled(), torch.cuda.device_count(), index_of)
        self._lines = compiled().lines_kept()
        self._before = self._read()
        self._after: _Reading | None = None

    def stop(self) -> None:
        """Ends the count."""
        super().stop()
        self._after = self._read()

    def _read(self) -> _Reading:
        now = libraries.counts()
        waits = [HostWait(*wait) for wait in compiled().read_lines(self._lines)]
        in_graphs = compiled().launches_in_graphs()[: torch.cuda.device_count()]
        return _Reading(Counter(now.calls), now.contexts, waits, in_graphs)

    def _now(self) -> _Reading:
        return self._read() if self._after is None else self._after

    @property
    def calls(self) -> Counter[str]:
        """The calls of CUDA, by function."""
        return self._now().calls - self._before.calls

    @property
    def host_waits(self) -> list[HostWait]:
        """Where the host has waited."""
        return self._now().host_waits

    @property
    def allocations(self) -> int:
        """Calls that allocate memory."""
        return sum(self.calls[name] for name in ALLOCATING)

    @property
    def frees(self) -> int:
        """Calls that free memory."""
        return sum(self.calls[name] for name in FREEING)

    @property
    def new_streams(self) -> int:
        """Calls that make streams."""
        return sum(self.calls[name] for name in MAKING_STREAMS)

    @property
    def in_graphs(self) -> list[int]:
        """The launches that were in graphs, for each device."""
        return [after - before for before, after in zip(self._before.in_graphs, self._now().in_graphs, strict=True)]

    @property
    def new_contexts(self) -> list[int]:
        """The devices that have got a context."""
        return [index for index in self._now().contexts if index not in self._before.contexts]
