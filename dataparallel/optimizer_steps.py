"""Functions that run before each step of every optimizer. Any thread may add some at any time.

torch walks through its global hooks at each step, and fails if another thread changes them meanwhile. So it gets one
hook, when the first function is added, and keeps it. The hook walks through a copy of what was added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakMethod

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dataparallel import _torch

Function = Callable[[Optimizer], object]
F = TypeVar("F", bound=Function)

_lock = threading.Lock()
_added: dict[Function | WeakMethod[Function], None] = {}
_is_registered = False


def before_steps(function: F) -> F:
    """Calls ``function`` with the optimizer before each step of every optimizer, until it returns true.

    Of a bound method only a weak reference to the object is kept.
    """
    global _is_registered
    with _lock:
        if not _is_registered:
            register_optimizer_step_pre_hook(_torch.not_traced(_run))
            _is_registered = True
        _added[WeakMethod(function) if isinstance(function, MethodType) else function] = None
    return function


def _run(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for each in [*_added]:
        function = each() if isinstance(each, WeakMethod) else each
        if function is None or function(optimizer):
            _added.pop(each, None)
