"""Functions that run before each step of every optimizer. Any thread may add and remove some at any time.

torch walks through its global hooks at each step, and fails if another thread changes them meanwhile. So it gets one
hook, when the first function is added, and keeps it. The hook calls what is in a tuple, which is replaced as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dataparallel import _torch

Function = Callable[[Optimizer], object]


class _BeforeSteps:
    """What runs before each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: tuple[Function, ...] = ()
        self._is_registered = False

    def add(self, function: Function) -> Callable[[], None]:
        """Adds a function. Returns one that removes it."""
        with self._lock:
            if not self._is_registered:
                register_optimizer_step_pre_hook(_torch.not_traced(self._make_hook()))
                self._is_registered = True
            self._functions += (function,)
        return lambda: self._remove(function)

    def _remove(self, function: Function) -> None:
        with self._lock:
            self._functions = tuple(each for each in self._functions if each is not function)

    def _make_hook(self) -> Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]:
        def run(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for function in self._functions:
                function(optimizer)

        return run


_before = _BeforeSteps()


def before_each_step(function: Function) -> Callable[[], None]:
    """Calls ``function`` with the optimizer before each step of every optimizer. Returns a function that ends this."""
    return _before.add(function)
