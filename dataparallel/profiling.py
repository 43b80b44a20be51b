"""Named ranges: one for each stage of a call and for each replica. A profiler of torch or a trace records them.

``torch.profiler`` shows them beside the operators, and under ``torch.autograd.profiler.emit_nvtx`` they are NVTX
ranges. `dataparallel.trace` sets `recorder` here while it runs, and then gets the ranges, the waits for permits and the
copies between devices. While neither runs, each range costs two questions and makes no object, and a copy costs one.
This room measures nothing itself. Any room may call it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd import profiler

from dataparallel import _torch
from dataparallel.forks import in_forked_child

__all__ = ["Recorder", "Replicas", "is_recording", "note_gradients", "profiled", "replicas", "stage"]

T = TypeVar("T")

_NOTHING = nullcontext()


class Replicas(Protocol):
    """What watches the replicas of one call, from before the first one starts."""

    def run(self, slot: int, task: Callable[[], T]) -> T:
        """Runs the replica of a slot."""

    def waits(self, slot: int) -> None:
        """The replica has no permit from now on. All of them begin so."""

    def admitted(self, slot: int) -> None:
        """It has one."""


class Recorder(Protocol):
    """What a trace records. Any thread may call it."""

    def stage(
        self, name: str, detail: str, slot: int | None, profiled: AbstractContextManager[Any]
    ) -> AbstractContextManager[Any]:
        """A context that records the range of a stage, with ``profiled`` inside."""

    def replicas(self, module: str, devices: list[torch.device]) -> Replicas:
        """What watches the replicas of a call of ``module``, which is the name of a class."""

    def sent(self, route: str, number_of_bytes: int, source: torch.device, target: torch.device) -> None:
        """A copy between devices has been launched."""

    def gradients(self, slot: int) -> None:
        """A bucket of gradients is complete on a slot."""


recorder: Recorder | None = None
"""The trace that runs in this process. Only ``tracing.recorder`` sets it."""


def is_recording() -> bool:
    """True if a profiler of torch runs in this process.

    It asks for the process, because a profiler of all threads leaves no mark in a single thread's state.
    """
    return _torch.is_profiler_enabled()


def profiled(name: str) -> AbstractContextManager[Any]:
    """The range of a profile, if a profiler runs, else a context that does nothing."""
    return profiler.record_function(f"dataparallel::{name}") if is_recording() else _NOTHING


def stage(name: str, detail: str = "", slot: int | None = None) -> AbstractContextManager[Any]:
    """The range ``dataparallel::<name>`` if a profiler or a trace runs, else a context that does nothing.

    ``detail`` and ``slot`` are for a trace: the form whose stage it is, and the slot that it works for.
    """
    tracing = recorder
    if tracing is None:
        return profiled(name)
    return tracing.stage(name, detail, slot, profiled(name))


def replicas(module: str, devices: list[torch.device]) -> Replicas | None:
    """What watches the replicas of a call that begins now; ``None`` if nobody records."""
    tracing = recorder
    if tracing is not None:
        return tracing.replicas(module, devices)
    return _RangesOnly() if is_recording() else None


class _RangesOnly:
    """A range for each replica in a profile."""

    def run(self, slot: int, task: Callable[[], T]) -> T:
        with profiled(f"replica {slot}"):
            return task()

    def waits(self, slot: int) -> None:
        """A profile does not show it."""

    def admitted(self, slot: int) -> None:
        """A profile does not show it."""


def note_gradients(slot: int) -> None:
    """For a trace: a slot has the last gradient of a bucket."""
    tracing = recorder
    if tracing is not None:
        tracing.gradients(slot)


@in_forked_child
def _forget_after_fork() -> None:
    """A trace belongs to the process that began it."""
    global recorder
    recorder = None
