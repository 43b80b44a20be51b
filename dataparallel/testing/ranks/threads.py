"""`on_threads`: runs a function in n threads of this process, one for each rank, with torch's threaded process group.

torch has that group for its own tests, under a private name. All of torch's private names that the threads need are in
this file; without one of them a test is skipped with a sentence.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from dataparallel.testing.ranks import comms as groups
from dataparallel.testing.ranks.rank import Rank
from dataparallel.testing.ranks.reports import Ended, conclude, describe

__all__ = ["on_threads"]

GRACE = 2.0  # seconds that the other threads have after one has failed

GROUP = "torch.testing._internal.distributed.multi_threaded_pg"
NEEDED = ("_install_threaded_pg", "_uninstall_threaded_pg", "ProcessLocalGroup")

_one_run = threading.Lock()  # torch's threaded group is one for the process
_of_a_rank = threading.local()
_abandoned: list[threading.Thread] = []
"""Threads of earlier runs that did not end. Nothing can end a thread."""


def on_threads(
    function: Callable[..., Any],
    /,
    *args: Any,
    ranks: int = 2,
    backend: str | None = None,
    timeout: float = 60.0,
    comms: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Calls ``function(rank, *args, **kwargs)`` in a thread of this process for each rank, on the CPU.

    Any callable can run so, without a fork and without pickling. The threads share everything that a process has:
    torch's random generators (use ``rank.seeded``), environment, modules. Collectives are torch's own for threads; send
    and receive, and collectives with several tensors, may be missing.

    If a rank raises, the others are released from their collectives and have two seconds to end. A thread that does not
    end cannot be killed: the error shows its stack, and later calls of this function fail while it is alive.

    Args:
        function: what each rank runs.
        *args: passed on as they are.
        ranks: how many.
        backend: None or "threaded", for callers that pass it to processes too.
        timeout: seconds.
        comms: if there is a process group.
        **kwargs: passed on as they are.

    Returns:
        What the ranks have returned, in their order.

    Raises:
        RanksFailed: an `AssertionError` that names the rank that failed first, and says for each rank how it ended.
        unittest.SkipTest: if a rank has skipped the test, or this torch has no threaded process group.
        RuntimeError: inside a rank, or while a thread of an earlier run is still alive.
        ValueError: if ``ranks``, ``timeout`` or ``backend`` is none of those.
    """
    __tracebackhide__ = True
    if ranks < 1:
        raise ValueError(f"a test runs on 1 thread or more; got ranks={ranks!r}")
    if not timeout > 0:
        raise ValueError(f"a timeout is a number of seconds, more than 0; got {timeout!r}")
    if backend not in (None, "threaded"):
        raise ValueError(f"threads have one backend, 'threaded'; got {backend!r}: run the test in processes")
    if getattr(_of_a_rank, "inside", False):
        raise RuntimeError("on_threads was called inside a rank, and torch has one threaded process group at a time")
    threaded = _threaded_group() if comms else None
    with _one_run:
        _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
        for thread in _abandoned:
            thread.join(GRACE)
        _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
        if _abandoned:
            raise RuntimeError(
                f"{_abandoned[0].name} of an earlier test still runs, and nothing can end a thread: its collectives "
                "would mix with those of this test. Mend that test, or run it in processes"
            )
        began = time.monotonic()
        with contextlib.nullcontext() if threaded is None else _installed(threaded):
            ended = _Run(function, args, kwargs, ranks, timeout, threaded).ended()
        return conclude("threads", ended, time.monotonic() - began)


def _threaded_group() -> ModuleType:
    """torch's module, or a skip that says what is missing."""
    if not torch.distributed.is_available():
        raise unittest.SkipTest(groups.why_not())
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
def _installed(threaded: ModuleType) -> Iterator[None]:
    """Inside, each thread has process groups of its own, and what torch shares between threads is guarded."""
    from torch.distributed import distributed_c10d

    isolate = getattr(torch._C._distributed_c10d, "_set_thread_isolation_mode", lambda _: None)
    with contextlib.ExitStack() as stack:
        stack.callback(isolate, False)
        isolate(True)
        before = distributed_c10d._world
        threaded.ProcessLocalGroup.reset()
        stack.callback(_reset, threaded)
        stack.callback(_leave, threaded, before)
        world = threaded._install_threaded_pg()
        if not hasattr(world, "comms"):
            world.comms = []  # torch 2.11 asks for it when a group ends, and its threads have none
        stack.enter_context(_replaced(threaded, "_store_based_barrier", _meet))
        stack.enter_context(_one_propagates())
        yield


def _reset(threaded: ModuleType) -> None:
    """Forgets the failure of a run, unless one of its threads has still to hear of it."""
    if not _abandoned:
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


class _Run:
    """One run: its threads, and what has become of each."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: int,
        timeout: float,
        threaded: ModuleType | None,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.timeout = timeout
        self.threaded = threaded
        self.store = getattr(torch.distributed, "HashStore")() if threaded is not None else None  # noqa: B009
        self.done: dict[int, Ended] = {}
        self.news = threading.Condition()
        name = getattr(function, "__qualname__", repr(function))
        self.threads = [
            threading.Thread(target=self._rank, args=(number, ranks), name=f"rank {number} of {name}", daemon=True)
            for number in range(ranks)
        ]

    def ended(self) -> list[Ended]:
        for thread in self.threads:
            thread.start()
        try:
            self._wait(self.timeout, stop_at_failure=True)
            hung = {} if self._failed() else self._stacks()
            if self._running():
                self._release()
                self._wait(GRACE)
            # Those that could be released have waited for the others, unless all have waited for each other.
            culprits = [number for number in hung if number not in self.done] or list(hung)
            for number, stack in hung.items():
                if number in culprits:
                    self._say(number, f"did not end within {self.timeout:g} s", stack, "died")
                else:
                    self._say(number, "waited for the others, and was released", stack, "stopped")
            for number, stack in self._stacks().items():
                self._say(number, "did not end after another rank had failed", stack, "stopped")
        finally:  # Ctrl-C too
            if self._running():
                self._release()
            for thread in self.threads:
                thread.join(0.5)
            _abandoned.extend(thread for thread in self.threads if thread.is_alive())
        return [self.done[number] for number in sorted(self.done)]

    def _rank(self, number: int, count: int) -> None:
        device = torch.device("cpu")
        rank = Rank(number, count, device, [device], "threads")
        _of_a_rank.inside = True
        try:
            with contextlib.nullcontext() if self.threaded is None else self._group(rank):
                result = self.function(rank, *self.args, **self.kwargs)
            ended = Ended(number, "returned", at=time.monotonic(), result=result)
        except BaseException as error:
            ended = self._describe(number, error)
        with self.news:
            self.done.setdefault(number, ended)
            self.news.notify_all()

    def _describe(self, number: int, error: BaseException) -> Ended:
        """A rank that torch's group or `_meet` has released is no failure of its own."""
        at = time.monotonic()
        released = isinstance(error, _Released) or (
            isinstance(error, SystemExit)
            and self.threaded is not None
            and self.threaded.ProcessLocalGroup._terminate.is_set()
        )
        ended = describe(number, error, at)
        if released:
            ended.how, ended.what = "stopped", "waited for the others, and was released"
        return ended

    @contextmanager
    def _group(self, rank: Rank) -> Iterator[None]:
        from torch import distributed

        distributed.init_process_group(
            "threaded",
            rank=rank.number,
            world_size=rank.count,
            store=self.store,
            timeout=timedelta(seconds=self.timeout + 30),
        )
        yield
        if distributed.is_initialized():
            distributed.barrier()
            distributed.destroy_process_group()

    def _failed(self) -> list[Ended]:
        return [end for end in self.done.values() if end.how != "returned"]

    def _running(self) -> list[int]:
        return [number for number in range(len(self.threads)) if number not in self.done]

    def _wait(self, seconds: float, stop_at_failure: bool = False) -> None:
        with self.news:
            self.news.wait_for(lambda: not self._running() or (stop_at_failure and bool(self._failed())), seconds)

    def _release(self) -> None:
        """Lets the ranks that wait in a collective end."""
        if self.threaded is None:
            return
        group = self.threaded.ProcessLocalGroup
        group._terminate.set()
        # Not torch's own handler: it walks through the collectives while others change them.
        with group._coll_lock:
            collectives = list(group._cur_coll_on_pgs.values())
        for collective in collectives:
            for condition in (collective._start_cond, collective._done_cond):
                with condition:
                    condition.notify_all()

    def _stacks(self) -> dict[int, str]:
        """What the ranks do that have not ended."""
        frames = sys._current_frames()
        stacks = {}
        for number in self._running():
            frame = frames.get(self.threads[number].ident or 0)
            stacks[number] = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return stacks

    def _say(self, number: int, what: str, stack: str, how: Any) -> None:
        if self.threads[number].is_alive() and number not in self.done:
            what += "; nothing can end a thread, and it still runs"
        with self.news:
            at = self.done[number].at if number in self.done else time.monotonic()
            self.done[number] = Ended(number, how, what, at, stacks=stack)
