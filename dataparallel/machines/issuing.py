"""`Issuing`: the issuing thread, which issues collectives one after the other, in the order that the launcher gives.

A launch may block until all ranks have come to it: NCCL's first one on a device, and some of gloo. Meanwhile the other
ranks need this one's proposals for the ``order`` of other collectives, and the launcher makes them: if one thread did
both, ranks would wait for each other in a circle. Only ``launcher`` uses this file.

The thread ends when there has been nothing for a while. It is a daemon: at the end of the interpreter it may block.
What is called may raise anything; an error that is no ``Exception`` would end the thread that asks for the result, so
it becomes a ``RuntimeError``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["Issuing"]

IDLE = 2.0
"""Seconds after which the thread ends if there is nothing to do."""


class Issuing:
    """The thread and its queue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the thread, and that it sees every call
        self._queue: queue.Queue[tuple[Callable[[], object], Future[None]] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], object]) -> Future[None]:
        """``call`` is called when the calls before have returned. The result says when it has returned or raised."""
        future: Future[None] = Future()
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="machines: issuing", daemon=True)
                thread.start()  # if there can be no thread, nothing has changed
                self._thread = thread
            self._queue.put((call, future))
        return future

    def close(self, until: float) -> bool:
        """Makes no more calls, and waits for the one that is being made until this time, of the monotonic clock.

        Returns true if no call is being made any more.
        """
        with self._lock:
            while not self._queue.empty():
                self._queue.get_nowait()
            thread = self._thread
            if thread is not None:
                self._queue.put(None)
        if thread is not None:
            thread.join(max(0.0, until - time.monotonic()))
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            call, future = found
            try:
                call()
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                other = RuntimeError(f"{type(error).__name__}: {error}")
                other.__cause__ = error
                future.set_exception(other)
                del other
            else:
                future.set_result(None)
            del call, future, found  # nothing is held while there is nothing to do

    def _next(self) -> tuple[Callable[[], object], Future[None]] | None:
        """The next call. ``None`` if there is none: the thread ends, and the next `put` starts another one."""
        try:
            found = self._queue.get(timeout=IDLE)
        except queue.Empty:
            found = None
        if found is None:
            with self._lock:
                while found is None and not self._queue.empty():  # put meanwhile
                    found = self._queue.get_nowait()
                if found is None:
                    self._thread = None
        return found
