"""What a host thread has waited for, carried to where its orders go: threads that it starts or joins, and replicas.

A thread that has synchronised with a stream may use what the stream wrote from any other stream, and so may a thread
that it starts afterwards. The clocks keep this knowledge for each thread; into the threads of the autograd engine it
travels with torch's thread-local state. Threads that hand work to each other by locks or queues (executors, too) are
not followed, and get an alarm although the host did wait: wait once more, for the stream or an event, in the thread
that uses the result.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from dataparallel.testing.simulated import device_module
from dataparallel.threads import settings

__all__ = ["ROW", "carry_knowledge"]

ROW = "simulated host waits"


def carry_knowledge() -> None:
    """Follows ``threading.Thread`` and replicas from now on. Called once."""
    device_module._C.enter_thread(None)
    thread: Any = threading.Thread
    thread.start = _start_telling(thread.start)
    thread._bootstrap_inner = _begin_knowing(thread._bootstrap_inner)
    thread.join = _join_learning(thread.join)
    thread.is_alive = _look_learning(thread.is_alive)
    settings.carry(settings.Setting(ROW, _read, _hold))


def _start_telling(start: Any) -> Any:
    @functools.wraps(start)
    def start_telling(self: threading.Thread) -> None:
        # A copy: what this thread waits for later, the new one does not know.
        vars(self)["_simulated_known"] = device_module._C.snapshot()
        start(self)

    return start_telling


def _begin_knowing(bootstrap: Any) -> Any:
    @functools.wraps(bootstrap)
    def begin_knowing(self: threading.Thread) -> None:
        device_module._C.enter_thread(vars(self).pop("_simulated_known", None))
        vars(self)["_simulated_knows"] = device_module._C.knowledge()
        bootstrap(self)

    return begin_knowing


def _learn_from(thread: threading.Thread) -> None:
    """What an ended thread has waited for, whoever sees that it has ended has waited for too."""
    known = vars(thread).get("_simulated_knows")
    if known is not None:
        device_module._C.learn(known)


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


def _read(slots: Sequence[torch.device]) -> Any:
    # A copy for the replicas, so that none knows what another one has told their caller meanwhile.
    return device_module._C.snapshot(), device_module._C.knowledge()


def _hold(value: Any, slots: Sequence[torch.device], device: torch.device) -> Any:
    """The replica knows what its caller knew, and the caller learns from it when the replica ends."""
    known, caller = value
    device_module._C.learn(known)
    return lambda: device_module._C.tell(caller)
