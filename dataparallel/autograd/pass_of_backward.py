"""One pass of backward: what belongs to it while it runs, and what happens when it ends, in success or in failure.

A pass is one run of torch's engine, also one that a reentrant checkpoint nests in another. Whoever needs to know of
a pass asks `running_pass` in the backward of a node. What a pass computes is not known here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeVar

from dataparallel import _torch

T = TypeVar("T")

_passes: dict[int, PassOfBackward] = {}  # those that run, by the engine's number


def running_pass() -> PassOfBackward:
    """The pass that the calling thread runs a node or an end of. Any thread of the engine gets the same object.

    Raises:
        RuntimeError: no backward runs in this thread.
    """
    number = _torch.current_graph_task_id()
    found = _passes.get(number)
    if found is None:
        made = PassOfBackward(number)
        found = _passes.setdefault(number, made)  # without a lock: the garbage collector may end a pass anywhere
        if found is made:
            try:
                _torch.queue_callback(_End(made))
            except BaseException:
                del _passes[number]
                raise
    return found


def error_of_failed_pass() -> RuntimeError:
    """What is told to others when a pass has failed. The engine raises the pass's own error where it was called."""
    return RuntimeError("a backward has failed; it raised its own error")


class PassOfBackward:
    """One pass. Its threads may use it at the same time.

    Attributes:
        contents: what its users keep for as long as it runs, by keys of theirs.
    """

    def __init__(self, number: int) -> None:
        self.contents: dict[Hashable, object] = {}
        self._number = number
        self._at_end: deque[Callable[[bool], object]] = deque()
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[PassOfBackward], T]) -> T:
        """What is kept under ``key``. The first call in the pass makes it by ``make(self)``."""
        with self._lock:
            if key not in self.contents:
                self.contents[key] = make(self)
            return self.contents[key]  # type: ignore[return-value]

    def is_first(self, key: Hashable) -> bool:
        """True for the first call with this key."""
        token = object()
        return self.contents.setdefault(key, token) is token

    def on_end(self, function: Callable[[bool], object]) -> None:
        """Calls ``function(ok)`` when the pass ends, in the order of these calls.

        With ``True`` it has succeeded so far: the function runs where ``backward()`` was called, and what it raises is
        the error of the pass, of which the functions after it hear. With ``False`` it has failed, and all threads have
        left it: the function runs in any of them.
        """
        self._at_end.append(function)

    def end_pass(self, ok: bool) -> None:
        """Calls the functions that have not been called."""
        try:
            while self._at_end:
                self._at_end.popleft()(ok)  # a function may hold much, and goes when it has been called
        except BaseException as error:
            try:
                self.end_pass(False)
            except BaseException as further:
                raise error from further
            raise
        self.contents.clear()
        _passes.pop(self._number, None)


class _End:
    """What the engine calls when a pass succeeds. If the pass fails, the engine drops it when all threads have left."""

    def __init__(self, of_pass: PassOfBackward) -> None:
        self._pass = of_pass

    def __call__(self) -> None:
        self._pass.end_pass(True)

    def __del__(self) -> None:
        self._pass.end_pass(False)
