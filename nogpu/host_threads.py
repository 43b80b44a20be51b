"""Carries what a host thread has waited for to the threads that it starts or that join it, and by queues.

A thread that has waited for a stream may use on any stream what that one has written, and so may the threads that it
starts afterwards. The clocks keep this knowledge for each thread; torch carries it into the threads of the autograd
engine. A ``queue.Queue`` carries what its users knew when they put something in, and an executor of threads what the
caller of ``submit`` and the task know. Threads that pass work to each other in other ways, such as locks, events and
``queue.SimpleQueue``, are not followed: there the clocks raise although the host has waited. A library that hands work
to threads of its own in such a way calls `known_here` in the thread that gives the work, and `known_there` in the one
that does it. `simulate` and the stand-in for CUDA call `carry_knowledge`.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import queue
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

_clocks: Any = None


def wait_at_exit() -> None:
    """Gives threads of the autograd engine a moment before the interpreter ends.

    They may still be freeing a graph, for which they need Python.
    """
    atexit.register(time.sleep, 0.1)


def carry_knowledge(clocks: ModuleType) -> None:
    """Follows threads, queues and executors from now on. To be called once, with the compiled module of clocks."""
    global _clocks
    _clocks = clocks
    clocks.enter_thread(None)
    thread: Any = threading.Thread
    thread.start = _start_telling(thread.start)
    thread._bootstrap_inner = _begin_knowing(thread._bootstrap_inner)
    thread.join = _join_learning(thread.join)
    thread.is_alive = _look_learning(thread.is_alive)
    some_queue: Any = queue.Queue
    some_queue.put = _put_telling(some_queue.put)
    some_queue.get = _get_learning(some_queue.get)
    executor: Any = concurrent.futures.ThreadPoolExecutor
    executor.submit = _submit_telling(executor.submit)
    future: Any = concurrent.futures.Future
    future.result = _result_learning(future.result)


def _start_telling(start: Any) -> Any:
    @functools.wraps(start)
    def start_telling(self: threading.Thread) -> None:
        # A copy, because the new thread does not know what this one waits for later.
        vars(self)["_simulated_known"] = _clocks.snapshot()
        start(self)

    return start_telling


def _begin_knowing(bootstrap: Any) -> Any:
    @functools.wraps(bootstrap)
    def begin_knowing(self: threading.Thread) -> None:
        _clocks.enter_thread(vars(self).pop("_simulated_known", None))
        vars(self)["_simulated_knows"] = _clocks.knowledge()
        bootstrap(self)

    return begin_knowing


def _learn_from(thread: threading.Thread) -> None:
    """Adds what an ended thread has waited for to the knowledge of the calling thread, which has seen that end."""
    known = vars(thread).get("_simulated_knows")
    if known is not None:
        _clocks.learn(known)


def _join_learning(join: Any) -> Any:
    @functools.wraps(join)
    def join_learning(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        self.is_alive()  # learns

    return join_learning


def _look_learning(is_alive: Any) -> Any:
    @functools.wraps(is_alive)
    def look_learning(self: threading.Thread) -> bool:
        alive: bool = is_alive(self)
        if not alive:
            _learn_from(self)
        return alive

    return look_learning


def _put_telling(put: Any) -> Any:
    @functools.wraps(put)
    def put_telling(self: Any, item: Any, *args: Any, **options: Any) -> None:
        if "_simulated_known" not in vars(self):
            vars(self)["_simulated_known"] = _clocks.snapshot()
        _clocks.tell(vars(self)["_simulated_known"])
        put(self, item, *args, **options)

    return put_telling


def _get_learning(get: Any) -> Any:
    @functools.wraps(get)
    def get_learning(self: Any, *args: Any, **options: Any) -> Any:
        item = get(self, *args, **options)
        known = vars(self).get("_simulated_known")
        if known is not None:
            _clocks.learn(known)
        return item

    return get_learning


def _submit_telling(submit: Any) -> Any:
    @functools.wraps(submit)
    def submit_telling(self: Any, task: Any, /, *args: Any, **options: Any) -> Any:
        known, knows = _clocks.snapshot(), []

        def task_knowing(*args: Any, **options: Any) -> Any:
            _clocks.learn(known)
            try:
                return task(*args, **options)
            finally:
                knows.append(_clocks.snapshot())

        future = submit(self, task_knowing, *args, **options)
        vars(future)["_simulated_knows"] = knows
        return future

    return submit_telling


def _result_learning(result: Any) -> Any:
    @functools.wraps(result)
    def result_learning(self: Any, timeout: float | None = None) -> Any:
        try:
            return result(self, timeout)
        finally:
            for known in vars(self).get("_simulated_knows", ()):
                _clocks.learn(known)

    return result_learning


def known_here() -> Any:
    """What the calling thread has waited for, for `known_there` in other threads; ``None`` if nothing is watched."""
    # A copy, so that no thread knows what another one adds to the caller's knowledge meanwhile.
    return None if _clocks is None else (_clocks.snapshot(), _clocks.knowledge())


def known_there(known: Any) -> Callable[[], None] | None:
    """Adds what another thread had waited for to the calling thread's knowledge.

    Returns:
        A function that the calling thread calls when its work is done: it tells the other thread what this one knows.
    """
    if known is None:
        return None
    snapshot, giver = known
    _clocks.learn(snapshot)
    return lambda: _clocks.tell(giver)
