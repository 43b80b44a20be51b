"""`Issuing`: the issuing thread, which issues collectives one after the other, in the order that the launcher gives.

A launch may block until all ranks have come to it: NCCL's first one on a device, and some of gloo. Meanwhile the other
ranks need this one's proposals for the ``order`` of other collectives, and the launcher makes them: if one thread did
both, ranks would wait for each other in a circle. Only ``launcher`` uses this file.

The thread ends when there has been nothing for a while. It is a daemon: at the end of the interpreter it may block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["Issuing"]

IDLE = 2.0
"""Seconds after which the thread ends if there is nothing to do."""


class Issuing:
    """The thread and its queue."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], object], Future[None]]] = deque()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], object]) -> Future[None]:
        """``call`` is called when the calls before have returned. The result says when it has returned or raised."""
        future: Future[None] = Future()
        with self._changed:
            self._queue.append((call, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="machines: issuing", daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._changed.wait(IDLE)
                if not self._queue:
                    self._thread = None
                    return
                call, future = self._queue.popleft()
            try:
                call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del call, future  # nothing is held while there is nothing to do
