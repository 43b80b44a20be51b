"""Named ranges in a profile: one for each stage of a call and for each replica.

``torch.profiler`` shows them beside the operators, and under ``torch.autograd.profiler.emit_nvtx`` they are NVTX
ranges. Without a profiler nothing is recorded and no object is made. This room measures nothing itself. Any room may
call it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch.autograd import profiler

from dataparallel import _torch

__all__ = ["in_range", "is_recording", "stage"]

T = TypeVar("T")

_NOTHING = nullcontext()


def is_recording() -> bool:
    """True if a profiler of torch runs in this process.

    It asks for the process, because a profiler of all threads leaves no mark in a single thread's state.
    """
    return _torch.is_profiler_enabled()


def stage(name: str) -> AbstractContextManager[Any]:
    """The range ``dataparallel::<name>`` if a profiler runs, else a context that does nothing."""
    return profiler.record_function(f"dataparallel::{name}") if is_recording() else _NOTHING


def in_range(name: str, task: Callable[[], T]) -> T:
    """Runs ``task`` in the range ``dataparallel::<name>``."""
    with stage(name):
        return task()
