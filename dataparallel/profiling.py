"""Named ranges in a profile: one for each stage of a call and for each replica.

``torch.profiler`` shows them beside the operators, and under ``torch.autograd.profiler.emit_nvtx`` they are NVTX
ranges. Without a profiler nothing is recorded and no object is made. This room measures nothing itself. Any room may
call it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch.autograd import profiler

from dataparallel import _torch

__all__ = ["in_stage", "is_recording", "stage"]

T = TypeVar("T")
P = ParamSpec("P")

_NOTHING = nullcontext()


def is_recording() -> bool:
    """True if a profiler of torch runs in this process.

    It asks for the process, because a profiler of all threads leaves no mark in a single thread's state.
    """
    return _torch.is_profiler_enabled()


def stage(name: str) -> AbstractContextManager[Any]:
    """The range ``dataparallel::<name>`` if a profiler runs, else a context that does nothing."""
    return profiler.record_function(f"dataparallel::{name}") if is_recording() else _NOTHING


def in_stage(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: each call of the function is a range ``dataparallel::<name>``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def in_its_range(*args: P.args, **kwargs: P.kwargs) -> T:
            with stage(name):
                return function(*args, **kwargs)

        return in_its_range

    return decorate
