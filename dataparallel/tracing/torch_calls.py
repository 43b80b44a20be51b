"""Records what torch itself does in a step: backward, and the steps of optimizers.

torch has no hooks around a backward pass. So while a trace runs, ``torch.autograd.backward`` (which ``Tensor.backward``
calls) and ``grad`` are functions of this room. Code that has imported them by name before is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dataparallel import _torch, profiling
from dataparallel.tracing.recorder import Recorder

_ENGINE_CALLS = ("backward", "grad")
"""Functions of ``torch.autograd`` that run the engine."""


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Inside, backward passes and optimizers' steps of all threads are recorded."""

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recorder.optimizer_begins(optimizer)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recorder.optimizer_ends(optimizer)

    replaced = {name: _Replaced(name, recorder) for name in _ENGINE_CALLS}
    handles = [
        register_optimizer_step_pre_hook(_not_compiled(before)),
        register_optimizer_step_post_hook(_not_compiled(after)),
    ]
    try:
        for each in replaced.values():
            each.put()
        yield
    finally:
        for each in replaced.values():
            each.take_back()
        for handle in handles:
            handle.remove()


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which ``torch.compile`` around a step calls between its graphs instead of tracing it."""
    not_traced = _torch.not_traced(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        # To call what is not traced imports the compiler, so only if that is loaded.
        return (not_traced if _torch.is_compiler_loaded() else function)(*args, **kwargs)

    return call


class _Replaced:
    """One function of ``torch.autograd``, recorded."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name, self._recorder = name, recorder
        self._original: Callable[..., Any] = getattr(torch.autograd, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if profiling.recorder is not recorder:  # somebody has kept this function
                return self._original(*args, **kwargs)
            with recorder.backward():
                return self._original(*args, **kwargs)

        self._call = wraps(self._original)(_not_compiled(call))

    def put(self) -> None:
        setattr(torch.autograd, self._name, self._call)

    def take_back(self) -> None:
        """Only if it is still there: other code may have wrapped it meanwhile, and will put its own former one back."""
        if getattr(torch.autograd, self._name) is self._call:
            setattr(torch.autograd, self._name, self._original)
