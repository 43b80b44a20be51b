"""What users ask of the stand-in while it runs: clocks, late answers, skipped work, timelines, and faults.

`nogpu.cuda` has these names. They work once `stand_in` has been called. ``counts`` has `counted`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from nogpu.compiling import SimulationUnavailable
from nogpu.cuda import extension, libraries
from nogpu.shared import Device, Switches, index_among
from nogpu.timeline.recording import Timeline, record


class Blocks:
    """Switches something on while blocks of any thread are open.

    Args:
        switch: is called with true or false when a block begins and ends, by one thread at a time.
    """

    def __init__(self, switch: Callable[[bool], None]) -> None:
        self._switch, self._lock, self._open = switch, threading.Lock(), 0

    def begin(self) -> None:
        """A block begins."""
        self._count(1)

    def end(self) -> None:
        """A block ends."""
        self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._switch(self._open + more > 0)
            self._open += more


def watch_libraries(compiled: Any) -> None:
    """Sees to the operators of every library that is opened from now on. ``start`` calls it once."""
    for owner, name in ((importlib.machinery.ExtensionFileLoader, "create_module"), (ctypes.CDLL, "__init__")):
        setattr(owner, name, _watched(getattr(owner, name), compiled))


def _watched(opening: Callable[..., Any], compiled: Any) -> Callable[..., Any]:
    @functools.wraps(opening)
    def watched(*args: Any, **options: Any) -> Any:
        before = compiled.operators_now()
        result = opening(*args, **options)
        compiled.compute_those_since(before)
        return result

    return watched


def compiled() -> Any:
    """The compiled module. Raises `SimulationUnavailable` if this process has no stand-in."""
    if extension.C is None:
        raise SimulationUnavailable("this process has no stand-in for CUDA: call stand_in first")
    return extension.C


_switches = Switches(compiled)
_late_queries = Blocks(lambda late: compiled().answer_queries_late(late))
_skipping = Blocks(lambda skips: compiled().set_skipping(skips))
_describing = threading.local()


def clocks(enabled: bool = True, *, stacks: bool | None = None) -> AbstractContextManager[None]:
    """Switches the clocks on or off while inside, for all threads; see `stand_in`.

    If blocks are open in several threads, the one that was entered last decides.

    Args:
        enabled: if False, no access raises, and memory that is used inside has gaps in its history.
        stacks: if True, each access keeps its Python stack for the message of a later race, which is slow. ``None``
            changes nothing.
    """
    return _switches.set(enabled, stacks)


def check_clocks() -> None:
    """For the end of a test: raises for what the clocks have found and could not raise at once.

    That is, in this order: an operator of the CPU that used pinned memory before a stream was done with it; a race in a
    call of CUDA whose error nobody has asked for; and memory that was freed while a stream might still use it, unless
    the calling thread has waited for that stream since. The error is the first one found, and the clocks forget all.

    Raises:
        RuntimeError: ``race: ...`` or ``freed too early: ...``.
    """
    c = compiled()
    problems = [problem for problem in (c.take_host_problem(), *c.take_untold()) if problem]
    try:
        c.check()
    except RuntimeError as freed:
        if not problems:
            raise
        problems.append(str(freed))
    if problems:
        raise RuntimeError(problems[0])


@contextmanager
def late_queries() -> Iterator[None]:
    """While inside, events and streams answer "not yet" as long as nothing proves that they are done.

    A GPU may be as late as that. ``event.query()`` is then True only if the calling thread has waited for the event or
    for something after it. The allocator then also gets memory back late that was freed with ``record_stream``. A loop
    that ends when a query says so never ends, unless another thread or call waits.
    """
    _late_queries.begin()
    try:
        yield
    finally:
        _late_queries.end()


@contextmanager
def skipped_work() -> Iterator[None]:
    """While inside, operators, copies and fills are launched and never done: memory keeps what it has.

    So a model of real size takes no longer than its Python, and device memory that nobody writes takes none of the
    host's. Counts, clocks and timelines see the same launches. Values mean nothing. Some work
    is done all the same, on whatever is in memory: operators whose shapes depend on values, or are not known to torch's
    meta kernels; operators of sparse and quantised tensors, and of other libraries; attention that drops weights;
    collectives; functions of the host; kernels that are compiled at run time. Graphs may be captured outside or inside;
    a launch inside does nothing.
    """
    _skipping.begin()
    try:
        yield
    finally:
        _skipping.end()


@contextmanager
def described_kernels(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Iterator[None]:
    """Kernels that the calling thread launches inside are not run: it is said here what each of them touches.

    This is for kernels that find their memory in tables, inside `skipped_work`, where no table has anything in it.
    Counts, clocks and timelines see the launches with these bytes. Kernels are those of the driver and of CuPy.

    Args:
        reads: CUDA tensors of any device without holes, or views of them: their bytes are those that are read.
        writes: the same for what is written.

    Raises:
        ValueError: for a tensor that is not on a CUDA device, or has holes; and inside another such block.
    """
    if getattr(_describing, "is_open", False):
        raise ValueError("a block of described_kernels is open in this thread: leave it before you open another")
    for tensor in (*reads, *writes):
        if not tensor.is_cuda or not tensor.is_contiguous():
            raise ValueError(
                "described_kernels takes contiguous CUDA tensors, and views of them that are contiguous; got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            )
    accesses = [(one.data_ptr(), one.nbytes, False) for one in reads]
    compiled().describe_kernels([*accesses, *((one.data_ptr(), one.nbytes, True) for one in writes)])
    _describing.is_open = True
    try:
        yield
    finally:
        _describing.is_open = False
        compiled().describe_kernels(None)


def timeline(limit: int = 1_000_000, stacks: bool = False) -> AbstractContextManager[Timeline]:
    """Records every launch on the devices while inside, as `torch.sim.timeline` does for simulated devices.

    What it yields has a ``recording``, and a ``schedule(machine)`` that says when each launch would run on a machine
    that is described: see `nogpu.timeline`. Copies and fills are the calls of CUDA that torch
    makes for them (``cudaMemcpyAsync``), everything else is an operator. Not recorded is host work between operators of
    other libraries.

    Args:
        limit: the largest number of launches.
        stacks: if True, each launch keeps its Python stack, which is slow. Threads of a backward have none.

    Raises:
        TypeError: if ``limit`` is not an int.
        ValueError: if ``limit`` is less than 1.
        RuntimeError: on entry, if another block is open, in any thread; at the end, if there were more launches than
            ``limit``.
    """
    return record(compiled(), "nogpu.cuda.timeline", limit, stacks)


def set_link(source: Device, target: Device, state: str) -> None:
    """Says how the first device reaches the memory of the second.

    Args:
        source: a CUDA device.
        target: another one.
        state: "works"; "missing", so that they cannot be peers; "broken", so that copies between the two arrive wrong
            once they are peers, without an error, as on machines whose firmware is at fault.

    Raises:
        ValueError: if this is no device or no state.
    """
    compiled()
    libraries.set_link(index_of(source), index_of(target), state)


def set_capacity(device: Device, size: int | None) -> None:
    """Limits the memory of a device.

    Args:
        device: the current device if ``None``.
        size: in bytes, at least 1. ``None`` is what `stand_in` gave it.

    Raises:
        TypeError: if the size is not an int.
        ValueError: if the size is less than 1, or this is no device of the process.
    """
    compiled()
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise TypeError(f"a capacity is a number of bytes, an int, or None; got {type(size).__name__}")
    if size is not None and size < 1:
        raise ValueError(f"a capacity is a number of bytes, at least 1, or None; got {size}")
    libraries.set_capacity(index_of(device), size or 0)


def index_of(device: Device) -> int:
    """Returns the index of a CUDA device; for ``None`` that of the current one.

    Raises:
        ValueError: if this is no CUDA device, or if the process does not have it.
    """
    about = "this is about CUDA devices"
    return index_among(device, "cuda", about, torch.cuda.current_device, torch.cuda.device_count(), "has")


def pass_over_tools() -> None:
    """Frames of torch and of this package's testing tools are not where a program waits. Called by ``start``."""
    folders = (Path(torch.__file__).parent, Path(__file__).parents[1])
    compiled().pass_over([f"{folder}{os.sep}" for folder in folders] + ["<frozen "])


def host_reads() -> None:
    """Looks at what Python reads of tensors without an operator: ``tolist``, ``numpy``. ``start`` calls it once."""
    for name in ("tolist", "numpy", "__array__"):
        setattr(torch.Tensor, name, _looking(getattr(torch.Tensor, name), name))


def _looking(method: Any, name: str) -> Any:
    def looking(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if type(self) is torch.Tensor and self.device.type == "cpu":
            compiled().host_reads(self, name)
        return method(self, *args, **options)

    looking.__name__ = looking.__qualname__ = name
    looking.__doc__ = method.__doc__
    return looking
