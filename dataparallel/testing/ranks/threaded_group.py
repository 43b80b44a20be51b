"""torch's process group for threads: whether it is there, how it is put in place, and how ranks are released from it.

torch has it for its own tests, under a private name. All of torch's private names that threads as ranks need are in
this file; without one of them a test is skipped with a sentence. `threads` calls it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from dataparallel.testing.ranks import comms

GROUP = "torch.testing._internal.distributed.multi_threaded_pg"
NEEDED = ("_install_threaded_pg", "_uninstall_threaded_pg", "ProcessLocalGroup")


def threaded_group() -> ModuleType:
    """torch's module, or a skip that says what is missing."""
    if not torch.distributed.is_available():
        raise unittest.SkipTest(comms.why_not())
    try:
        module = importlib.import_module(GROUP)
        missing = [name for name in NEEDED if not hasattr(module, name)]
    except Exception as error:  # torch's private modules may need anything
        reason = f"{type(error).__name__}: {error}"
    else:
        if not missing:
            return module
        reason = f"it has no {missing[0]}"
    raise unittest.SkipTest(
        f"torch {torch.__version__} has no usable {GROUP}, the process group of threads ({reason}): run the test in "
        "processes"
    )


@contextmanager
def installed(threaded: ModuleType, is_abandoned: Callable[[], bool]) -> Iterator[None]:
    """Inside, each thread has process groups of its own, and what torch shares between threads is guarded.

    Afterwards the failure of a run is forgotten, unless ``is_abandoned()``: one of its threads has still to hear of it.
    """
    from torch.distributed import distributed_c10d

    isolate = getattr(torch._C._distributed_c10d, "_set_thread_isolation_mode", lambda _: None)
    with contextlib.ExitStack() as stack:
        stack.callback(isolate, False)
        isolate(True)
        before = distributed_c10d._world
        threaded.ProcessLocalGroup.reset()
        stack.callback(_reset, threaded, is_abandoned)
        stack.callback(_leave, threaded, before)
        world = threaded._install_threaded_pg()
        if not hasattr(world, "comms"):
            world.comms = []  # torch 2.11 asks for it when a group ends, and its threads have none
        stack.enter_context(_replaced(threaded, "_store_based_barrier", _meet))
        stack.enter_context(_one_propagates())
        yield


def _reset(threaded: ModuleType, is_abandoned: Callable[[], bool]) -> None:
    if not is_abandoned():
        threaded.ProcessLocalGroup.reset()


def _leave(threaded: ModuleType, before: Any) -> None:
    from torch.distributed import distributed_c10d

    threaded._uninstall_threaded_pg()
    distributed_c10d._world = before


def _one_propagates() -> AbstractContextManager[None]:
    """Inside, one thread at a time finds out placements: DTensor computes with fake tensors then.

    Threads that do so at once may crash. torch 2.11 has no lock for it, so there the whole method is guarded. If it is
    built for CUDA and there is no device, it also keeps a pointer into the first thread that uses fake tensors, which
    is then the caller's: a rank's thread ends, and the next run would crash.
    """
    try:
        from torch._subclasses import FakeTensorMode
        from torch.distributed.tensor._sharding_prop import ShardingPropagator
    except ImportError:
        return contextlib.nullcontext()
    lock, method = threading.RLock(), "_propagate_tensor_meta_non_cached"
    if hasattr(ShardingPropagator, "_fake_mode_lock") or not hasattr(ShardingPropagator, method):
        return _replaced(ShardingPropagator, "_fake_mode_lock", lock)
    with FakeTensorMode():
        pass
    unguarded = getattr(ShardingPropagator, method)

    def guarded(*args: Any) -> Any:
        with lock:
            return unguarded(*args)

    return _replaced(ShardingPropagator, method, guarded)


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    if not hasattr(holder, name):
        yield
        return
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _meet(rank: int, store: Any, group_name: str, count: int, timeout: timedelta, *_: Any) -> None:
    """All ranks of a group wait here for each other when it is made. Unlike torch's, it ends when a rank has failed."""
    terminated = sys.modules[GROUP].ProcessLocalGroup._terminate
    key = f"met:{group_name}"
    store.add(key, 1)
    until = time.monotonic() + timeout.total_seconds()
    while store.add(key, 0) < count:
        if terminated.is_set():
            raise _Released
        if time.monotonic() > until:
            raise RuntimeError(f"rank {rank} has waited {timeout} for the other ranks of a new process group")
        time.sleep(0.001)


class _Released(SystemExit):
    """Ends a rank that waits for one that has failed. A `SystemExit` is what torch's group raises too."""


def release(threaded: ModuleType) -> None:
    """Lets the ranks that wait in a collective end."""
    group = threaded.ProcessLocalGroup
    group._terminate.set()
    # Not torch's own handler: it walks through the collectives while others change them.
    with group._coll_lock:
        collectives = list(group._cur_coll_on_pgs.values())
    for collective in collectives:
        for condition in (collective._start_cond, collective._done_cond):
            with condition:
                condition.notify_all()


def is_released(error: BaseException, threaded: ModuleType | None) -> bool:
    """True for what ends a rank after `release`."""
    if isinstance(error, _Released):
        return True
    return isinstance(error, SystemExit) and threaded is not None and threaded.ProcessLocalGroup._terminate.is_set()
