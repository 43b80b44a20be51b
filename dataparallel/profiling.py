"""Named ranges, one for each stage of a call and for each replica, which a profiler of torch shows.

While no profiler runs, a range costs one question and makes no object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.autograd import profiler

from dataparallel import _torch

_NOTHING = nullcontext()


def stage(name: str, slot: int | None = None) -> AbstractContextManager[Any]:
    """The range ``dataparallel::<name>`` or ``dataparallel::<name> <slot>`` if a profiler runs, else a null context."""
    if not _torch.is_profiler_enabled():
        return _NOTHING
    return profiler.record_function(f"dataparallel::{name}" if slot is None else f"dataparallel::{name} {slot}")


def in_ranges(calls: Sequence[Callable[[], Any]]) -> Sequence[Callable[[], Any]]:
    """The replicas' ``calls``, each in its range if a profiler runs."""
    if not _torch.is_profiler_enabled():
        return calls
    return [partial(_in_range, slot, call) for slot, call in enumerate(calls)]


def _in_range(slot: int, call: Callable[[], Any]) -> Any:
    with stage("replica", slot):
        return call()
