"""`trace` records a block of a few steps; the `Trace` then tells where the time went.

torch has no hooks around a backward pass. So inside the block ``torch.autograd.backward``, which ``Tensor.backward``
calls, and ``torch.autograd.grad`` are functions of this file. Code that has imported them by name is not recorded.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, wraps
from types import TracebackType
from typing import Any

import torch

from dataparallel import _torch, profiling
from dataparallel.devices import CPU, all_devices, are_initialized
from dataparallel.optimizer_steps import after_each_step, before_each_step
from dataparallel.tracing import timeline
from dataparallel.tracing.recorder import Recorder, ThreadClocks, start, stop
from dataparallel.tracing.results import DeviceMemory, Results, results
from dataparallel.tracing.table import advice, text_of

_TRIES, _RANGES = 20, 10
"""`_cost_of_a_record` records this many ranges, this many times, and takes the shortest time."""


class Trace:
    """The context that `dataparallel.trace` returns. After its block it has the results.

    ``str(trace)`` and `table` are the tables. Before the block has ended, results, tables and files raise
    ``RuntimeError``.
    """

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._begin = self._end = 0
        self._behind = 0.0
        self._memory: list[DeviceMemory] = []
        self._stack = ExitStack()

    def __enter__(self) -> Trace:
        """
        Raises:
            RuntimeError: another trace runs in this process, or this one has recorded a block already.
        """
        if self._recorder is not None:
            raise RuntimeError("a trace records one block: call dataparallel.trace() again for another one")
        recorder = Recorder()
        with ExitStack() as stack:  # if a step fails, it undoes the steps before
            start(recorder)
            stack.callback(stop, recorder)
            stack.enter_context(torch_calls_recorded(recorder))
            memory = MemoryBefore()
            stack.callback(self._note_end, recorder, memory)
            self._stack = stack.pop_all()
        self._recorder = recorder
        self._begin = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end = time.perf_counter_ns()
        assert self._recorder is not None
        self._stack.close()
        self._recorder = recorder = self._recorder.until_now()
        if kind is None:
            self._wait_for_devices(recorder)
        else:  # a device may have failed, so its events are not read
            for span in recorder.spans:
                span.marks = None

    def _note_end(self, recorder: Recorder, memory: MemoryBefore) -> None:
        slots = [device for _, device in sorted(recorder.devices.copy().items())]
        self._memory = memory.until_now(slots)

    def _wait_for_devices(self, recorder: Recorder) -> None:
        marks = [end for span in recorder.spans if span.marks is not None for end in span.marks]
        if not marks:
            return
        clocks, begin = ThreadClocks(), time.perf_counter_ns()
        ran, core = clocks.ran(), clocks.waited_for_core() or 0
        recorder.clock.wait_for(marks)
        # The time in which the thread itself queries thousands of events, or has no core, is no wait for devices.
        querying = clocks.ran() - ran + (clocks.waited_for_core() or 0) - core
        self._behind = 1e-9 * max(0, time.perf_counter_ns() - begin - querying)

    @property
    def _ended(self) -> Recorder:
        if self._recorder is None or not self._end:
            raise RuntimeError("the trace has no results yet: they are made when its block has ended")
        return self._recorder

    @cached_property
    def results(self) -> Results:
        """All figures."""
        return results(self._ended, 1e-9 * (self._end - self._begin), self._behind, self._memory)

    @property
    def advice(self) -> str:
        """The last line of the tables: the largest cost, and what to try."""
        return advice(self.results)

    def table(self) -> str:
        """The tables, as text."""
        found = self.results
        return text_of(found, found.records * _cost_of_a_record())

    def __str__(self) -> str:
        return self.table()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes a timeline as a picture, in the format of the file's ending: ``trace.plot("step.png")``.

        It has a row for the caller, one for each slot, one for sums, and one for each other thread that called. Needs
        matplotlib.

        Raises:
            RuntimeError: matplotlib is not installed.
        """
        found, recorder = self.results, self._ended
        modules = ", ".join(found.modules)
        steps = f", {found.steps} steps" if found.steps > 1 else ""
        title = f"{modules}: {1e3 * found.seconds:.1f} ms{steps}" if modules else "no replica ran"
        timeline.draw(recorder, self._begin, found.seconds, path, title)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that https://ui.perfetto.dev and ``chrome://tracing`` show: ``trace.save("step.json")``."""
        timeline.save(self._ended, self._begin, path)


def trace() -> Trace:
    """Records a few steps, to see where their time goes: ``with dataparallel.trace() as trace: ...; print(trace)``.

    It records the calls of all wrappers and forms, in all threads, and on the thread of the block all that happens in
    between. Let the steps before it settle what is only done once: the choice of permits, compilers, allocators.

    The tables say how long each stage took on the calling thread, what each replica did and waited for, what was sent
    between devices, and what memory it took. Times are the host's. Where devices have events with times, the replicas'
    forward passes and the backward passes are timed on the devices too.

    When the block begins, the peaks of ``torch.accelerator.max_memory_allocated`` are set back on all devices, unless
    the process has used none yet. When it ends, the host waits for the devices. Inside the block
    ``torch.autograd.backward`` and ``torch.autograd.grad`` are replaced by functions that call torch's. One trace runs
    at a time.
    """
    return Trace()


def _cost_of_a_record() -> float:
    """Measures how many seconds it takes to record one range."""
    recorder, seconds = Recorder(), math.inf
    for _ in range(_TRIES):
        begin = time.perf_counter()
        for _ in range(_RANGES):
            with recorder.stage("tried"):
                pass
        seconds = min(seconds, (time.perf_counter() - begin) / _RANGES)
    return seconds


class MemoryBefore:
    """Reads the devices' memory counters when a block begins, and resets their peaks, so that a later peak is its own.

    Host memory has no such counters. Reading them makes no context on a device.
    """

    def __init__(self) -> None:
        # Looking at devices begins them, and the program that will use them may still choose which it sees. All
        # counters are 0 until then.
        self._before = _allocated(all_devices(), reset=True) if are_initialized() else None

    def until_now(self, slots: Sequence[torch.device]) -> list[DeviceMemory]:
        """The counters of each device of ``slots``, at the beginning of the block and now."""
        before, now = self._before, _allocated([device for device in dict.fromkeys(slots) if device != CPU])
        return [
            DeviceMemory(
                device,
                tuple(slot for slot, other in enumerate(slots) if other == device),
                0 if before is None else before[device],
                allocated,
                torch.accelerator.max_memory_allocated(device),
            )
            for device, allocated in now.items()
            if before is None or device in before
        ]


def _allocated(devices: Sequence[torch.device], reset: bool = False) -> dict[torch.device, int]:
    """How many bytes are allocated on each device that counts them. ``reset``: peaks begin anew."""
    found = {}
    for device in devices:
        try:
            if reset:
                torch.accelerator.reset_peak_memory_stats(device)
            found[device] = torch.accelerator.memory_allocated(device)
        except (RuntimeError, NotImplementedError):  # the backend has no such counters
            continue
    return found


@contextmanager
def torch_calls_recorded(recorder: Recorder) -> Iterator[None]:
    """Records the backward passes and optimizer steps of all threads inside the block."""
    with ExitStack() as stack:
        stack.callback(before_each_step(recorder.optimizer_begins))
        stack.callback(after_each_step(recorder.optimizer_ends))
        for name in ("backward", "grad"):
            stack.enter_context(_replaced(name, recorder))
        yield


@contextmanager
def _replaced(name: str, recorder: Recorder) -> Iterator[None]:
    """Records calls of this function of ``torch.autograd``, which runs the engine, inside the block."""
    original: Callable[..., Any] = getattr(torch.autograd, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if profiling.recorder is not recorder:  # other code has kept this function after the block
            return original(*args, **kwargs)
        with recorder.backward():
            return original(*args, **kwargs)

    replacement = wraps(original)(_not_compiled(call))
    setattr(torch.autograd, name, replacement)
    try:
        yield
    finally:
        # If other code has wrapped the function meanwhile, that code will restore it.
        if getattr(torch.autograd, name) is replacement:
            setattr(torch.autograd, name, original)


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function so that ``torch.compile`` around a step breaks the graph there and does not trace it."""
    not_traced = _torch.not_traced(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        # ``not_traced`` imports the compiler when it is called, so it is used only if the compiler is loaded.
        return (not_traced if _torch.is_compiler_loaded() else function)(*args, **kwargs)

    return call
