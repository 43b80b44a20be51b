"""Named ranges, one for each stage of a call and for each replica, for a profiler of torch or for `dataparallel.trace`.

A trace also gets waits for permits and copies between devices. While neither runs, each range costs two questions and
makes no object, and a copy costs one. This room measures nothing itself. Any room may call it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from dataparallel import _torch
from dataparallel.forks import in_forked_child

if TYPE_CHECKING:
    from dataparallel.tracing.recorder import Recorder

T = TypeVar("T")

_NOTHING = nullcontext()


class Replicas:
    """What watches the replicas of one call, from before the first one starts. This one makes ranges in a profile."""

    def run_replica(self, slot: int, task: Callable[[], T]) -> T:
        """Runs the replica of a slot."""
        with profiled(f"replica {slot}"):
            return task()

    def waits(self, slot: int) -> None:
        """The replica has no permit from now on. All of them begin so. A profile does not show it."""

    def admitted(self, slot: int) -> None:
        """It has one."""


recorder: Recorder | None = None
"""The trace that runs in this process. Only ``tracing.recorder`` sets it."""


def profiled(name: str) -> AbstractContextManager[Any]:
    """The range of a profile, if a profiler runs, else a context that does nothing."""
    return profiler.record_function(f"dataparallel::{name}") if _torch.is_profiler_enabled() else _NOTHING


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
    return Replicas() if _torch.is_profiler_enabled() else None


def note_gradients(slot: int) -> None:
    """For a trace: a slot has the last gradient of a bucket."""
    tracing = recorder
    if tracing is not None:
        tracing.gradients(slot)


def note_copy(route: str, source: Tensor, target: torch.device) -> None:
    """For a trace: ``source`` goes to the device ``target``. Who launches a copy says so; within a device none travels.

    ``route``: in a word or two, how: "direct" for one copy that the operation needs anyway, or the name of a route or
    of a transport.
    """
    if recorder is not None:
        note_copied_bytes(route, bytes_of(source), source.device, target)


def note_copied_bytes(route: str, number_of_bytes: int, source: torch.device, target: torch.device) -> None:
    """`note_copy` for a kernel that reads and writes several tensors."""
    tracing = recorder
    if tracing is not None and source != target:
        tracing.sent(route, number_of_bytes, source, target)


def bytes_of(tensor: Tensor) -> int:
    """The bytes that a copy of the tensor moves: of a sparse COO tensor those of its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return sum(part.numel() * part.itemsize for part in _torch.sparse_memory(tensor))
    return tensor.numel() * tensor.itemsize


@in_forked_child
def _forget_after_fork() -> None:
    """A trace belongs to the process that began it."""
    global recorder
    recorder = None
