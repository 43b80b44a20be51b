"""What a host thread has waited for, carried to where its orders go: threads that it starts or joins, and replicas.

A thread that has synchronised with a stream may use what the stream wrote from any other stream, and so may a thread
that it starts afterwards. The clocks keep this knowledge for each thread; into the threads of the autograd engine it
travels with torch's thread-local state. Threads that hand work to each other by locks or queues of their own are not
followed: synchronise, or wait for an event, in the thread that uses the result.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from dataparallel import thread_state
from dataparallel.testing.simulated import device_module

__all__ = ["ROW", "carry_knowledge"]

ROW = "simulated host waits"


def carry_knowledge() -> None:
    """Follows ``threading.Thread`` from now on, and replicas. Called once, in the main thread."""
    device_module._C.enter_thread(None)
    threading.Thread.start = _start_knowing(threading.Thread.start)  # type: ignore[method-assign]
    threading.Thread.join = _join_learning(threading.Thread.join)  # type: ignore[method-assign]
    thread_state.carry(thread_state.Setting(ROW, _read, _hold))


def _start_knowing(start: Any) -> Any:
    @functools.wraps(start)
    def start_knowing(self: threading.Thread) -> None:
        extension, run, known = device_module._C, self.run, device_module._C.knowledge()

        def run_knowing() -> None:
            nonlocal known
            extension.enter_thread(known)
            known = extension.knowledge()
            del self.run  # it refers to the thread
            self._simulated_knowledge = known  # type: ignore[attr-defined]
            run()

        self.run = run_knowing  # type: ignore[method-assign]
        start(self)

    return start_knowing


def _join_learning(join: Any) -> Any:
    @functools.wraps(join)
    def join_learning(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        known = getattr(self, "_simulated_knowledge", None)
        if known is not None and not self.is_alive():
            device_module._C.learn(known)

    return join_learning


def _read(slots: Sequence[torch.device]) -> Any:
    return device_module._C.knowledge()


def _hold(callers: Any, slots: Sequence[torch.device], device: torch.device) -> Any:
    """The replica knows what its caller knows, and the caller learns from it when the replica ends."""
    device_module._C.learn(callers)
    return lambda: device_module._C.tell(callers)
