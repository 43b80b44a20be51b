"""`on_threads`: runs a function in n threads of this process, one for each rank, with torch's threaded process group.

`threaded_group` has that group, and releases ranks from it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from dataparallel.testing.ranks.rank import Rank
from dataparallel.testing.ranks.reports import Ended, conclude, describe
from dataparallel.testing.ranks.threaded_group import installed, is_released, release, threaded_group

GRACE = 2.0  # seconds that the other threads have after one has failed

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
    threaded = threaded_group() if comms else None
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
        with contextlib.nullcontext() if threaded is None else installed(threaded, lambda: bool(_abandoned)):
            ended = _ThreadRun(function, args, kwargs, ranks, timeout, threaded).ended()
        return conclude("threads", ended, time.monotonic() - began)


class _ThreadRun:
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
        """A rank that was released is no failure of its own."""
        at = time.monotonic()
        ended = describe(number, error, at)
        if is_released(error, self.threaded):
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
        if self.threaded is not None:
            release(self.threaded)

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
