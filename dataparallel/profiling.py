"""Named ranges, one for each stage of a call and for each replica, which a profiler of torch shows.

While no profiler runs, a range costs one question and makes no object. `dataparallel.trace` is a profiler of torch too,
and tells this room what to run around each replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.autograd import profiler

from dataparallel import _torch
from dataparallel.forks import in_forked_child

_NOTHING = nullcontext()

Call: TypeAlias = Callable[[], Any]

around_replica: Callable[[int, torch.device, float, Call], Any] | None = None
"""Runs a replica: its slot, its device, for how many seconds it has waited for its turn, its call. A trace sets it."""


def stage(name: str, slot: int | None = None) -> AbstractContextManager[Any]:
    """The range ``dataparallel::<name>`` or ``dataparallel::<name> <slot>`` if a profiler runs, else a null context."""
    if not _torch.is_profiler_enabled():
        return _NOTHING
    return profiler.record_function(f"dataparallel::{name}" if slot is None else f"dataparallel::{name} {slot}")


def in_ranges(calls: Sequence[Call], slots: Sequence[torch.device]) -> Sequence[Call]:
    """The replicas' ``calls``, each in its range if a profiler runs."""
    if not _torch.is_profiler_enabled():
        return calls
    begin = time.perf_counter()
    return [
        partial(_in_range, slot, device, begin, call)
        for (slot, device), call in zip(enumerate(slots), calls, strict=True)
    ]


def _in_range(slot: int, device: torch.device, begin: float, call: Call) -> Any:
    around, waited = around_replica, time.perf_counter() - begin
    with stage("replica", slot):
        return call() if around is None else around(slot, device, waited, call)


@in_forked_child
def _forget_after_fork() -> None:
    """A trace belongs to the process that began it."""
    global around_replica
    around_replica = None
