"""What has to happen before an optimizer steps, known only while it is needed.

``units.tree`` has a step refused whose gradients are incomplete. Changes of parameters that no optimizer makes are not
seen here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dataparallel import _torch

__all__ = ["before_next_step"]

_lock = threading.Lock()
_waiting: dict[weakref.WeakMethod[Callable[[Optimizer], bool]], None] = {}
_hook: Any = None


def before_next_step(method: Callable[[Optimizer], bool]) -> None:
    """Has a bound method called with the optimizer before each step of any, until it returns true.

    Its object is referred to weakly.
    """
    global _hook
    with _lock:
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_run)
        _waiting[weakref.WeakMethod(method)] = None


@_torch.not_traced
def _run(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs before each step of every optimizer."""
    if not _waiting:
        return
    for reference in [*_waiting]:
        method = reference()
        if method is None or method(optimizer):
            with _lock:
                _waiting.pop(reference, None)
