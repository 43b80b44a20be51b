"""The process group of a rank's process: `with_comms` and what the fixtures make one with; and what a test needs.

Nothing here imports `torch.distributed` before a group is made, or asked for.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch

from dataparallel.testing.ranks.rank import Rank
from dataparallel.testing.ranks.slots import count_devices

F = TypeVar("F", bound=Callable[..., Any])

ours: GroupOfRanks | None = None
"""In the process of a rank: how its process group is made."""


def why_not(backend: str | None = None) -> str:
    """Why there can be no process group here, in a sentence; empty if there can."""
    if not torch.distributed.is_available():
        return f"torch {torch.__version__} has been built without torch.distributed"
    for part in ("gloo",) if backend is None else backend.split(","):
        name = part.rpartition(":")[2]
        available = getattr(torch.distributed, f"is_{name}_available", None)  # others are registered by their users
        if available is not None and not available():
            return f"torch {torch.__version__} has been built without the backend {name} of torch.distributed"
    return ""


def choose_backend(count: int) -> str:
    """nccl if each rank can have a CUDA device, else gloo.

    Raises:
        unittest.SkipTest: if this torch lacks it.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() >= count and not why_not("nccl"):
        return "nccl"
    require(None)
    return "gloo"


def require(backend: str | None) -> None:
    """Skips the test if there can be no such process group here."""
    reason = why_not(backend)
    if reason:
        raise unittest.SkipTest(reason)


class GroupOfRanks:
    """How the ranks of one run find each other: through a file of the run, so that no port is guessed.

    Args:
        where: the URL of that file.
        backend: what torch calls it.
        timeout: seconds, of the process group.
    """

    def __init__(self, where: str, backend: str | None, timeout: float) -> None:
        self.where = where
        self.backend = backend
        self.timeout = timeout

    @contextmanager
    def made(self, rank: Rank, backend: str | None = None, eager: bool = False) -> Iterator[None]:
        """Inside there is a process group; one that is there already stays as it is.

        After an error nobody waits for the other ranks, and the group ends with the process.
        """
        backend = backend or self.backend
        require(backend)
        from torch import distributed

        if distributed.is_initialized():
            yield
            return
        self.begin(rank, backend, eager)
        yield
        if distributed.is_initialized():
            distributed.barrier(device_ids=[rank.device.index] if rank.device.type == "cuda" else None)
            distributed.destroy_process_group()

    def begin(self, rank: Rank, backend: str | None, eager: bool = False) -> None:
        """Makes the process group, which ends with the process."""
        from torch import distributed

        _stay_on_this_machine()
        # torch has read TORCH_DISTRIBUTED_DEBUG when it was imported, which was before this process was forked.
        getattr(distributed, "set_debug_level_from_env")()  # noqa: B009 -- not declared for type checkers
        distributed.init_process_group(
            backend,
            init_method=self.where,
            rank=rank.number,
            world_size=rank.count,
            timeout=timedelta(seconds=self.timeout),
            device_id=rank.device if eager and rank.device.type == "cuda" else None,
        )


def _stay_on_this_machine() -> None:
    """Lets gloo use the loopback interface, which is there without a network and where the host's name is unknown."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    if "GLOO_SOCKET_IFNAME" not in os.environ and any(name == loopback for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = loopback


@overload
def with_comms(function: F, /) -> F: ...
@overload
def with_comms(*, eager_init: bool = False, backend: str | None = None) -> Callable[[F], F]: ...
def with_comms(function: Any = None, /, *, eager_init: bool = False, backend: str | None = None) -> Any:
    """Gives a test method of `ProcessTest` a process group: made before, destroyed after a barrier.

    It also decorates functions for the fixture ``on_processes`` with ``comms=False``. Where there is a group already,
    as on threads, and on slots, which need none, the function is just called.

    Args:
        function: the method, or a function whose first argument is a `Rank`. Without it, a decorator is returned.
        eager_init: if NCCL connects the ranks at once.
        backend: instead of that of the test.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(first: Any, *args: Any, **kwargs: Any) -> Any:
            rank: Rank = first if isinstance(first, Rank) else first.info
            if rank.place != "processes" or ours is None:
                return function(first, *args, **kwargs)
            with ours.made(rank, backend, eager_init):
                return function(first, *args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate if function is None else decorate(function)


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
        missing = why_not("gloo")
        return missing if missing and (why_not("nccl") or not torch.cuda.is_available()) else ""

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
