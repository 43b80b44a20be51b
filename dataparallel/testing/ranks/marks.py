"""Marks that say what a test needs: `skip_unless_devices` and `skip_unless_distributed`.

They look when the test runs, so that importing a test file touches no device.
"""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dataparallel.testing.ranks import comms
from dataparallel.testing.ranks.slots import count_devices

__all__ = ["skip_unless_devices", "skip_unless_distributed"]

T = TypeVar("T", bound=Callable[..., Any])


def skip_unless_devices(n: int) -> Callable[[T], T]:
    """Skips a test unless there are ``n`` accelerators where it runs: CUDA's, torch's others or simulated ones.

    It decorates a function, a method, or a class of tests, for pytest and for unittest.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"skip_unless_devices takes the number of devices that a test needs, 1 or more; got {n!r}")

    def reason() -> str:
        there = _count()
        return f"for {n} accelerators; there are {there}" if there < n else ""

    return lambda test: _unless(reason, test)


def skip_unless_distributed(test: T) -> T:
    """Skips a test unless torch can make a process group here: it has torch.distributed, and gloo or NCCL.

    It decorates a function, a method, or a class of tests, for pytest and for unittest.
    """

    def reason() -> str:
        missing = comms.why_not("gloo")
        return missing if missing and (comms.why_not("nccl") or not torch.cuda.is_available()) else ""

    return _unless(reason, test)


def _count() -> int:
    if hasattr(torch, "sim"):
        return count_devices("sim")
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _unless(reason: Callable[[], str], test: T) -> T:
    if isinstance(test, type):
        for name in dir(test):
            found = getattr(test, name)
            if name.startswith("test") and callable(found):
                setattr(test, name, _unless(reason, found))
        return test

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        why = reason()
        if why:
            raise unittest.SkipTest(why)
        return test(*args, **kwargs)

    return wrapper  # type: ignore[return-value]
