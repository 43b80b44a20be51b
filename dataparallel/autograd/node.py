"""`Node`: the base class of all autograd functions of the library.

Files that define autograd functions use it; ``torch.autograd.Function`` is for users. It changes one thing: the engine
calls ``backward`` in the thread of ``loss.backward()``, which may be part of a compiled function, and the compiler
leaves it alone there.
"""

from __future__ import annotations

from typing import Any

from torch.autograd import Function

from dataparallel import _torch

__all__ = ["Node"]


class Node(Function):
    """A ``torch.autograd.Function`` whose ``backward`` is never compiled by ``torch.compile``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_torch.not_traced(cls.backward))  # type: ignore[method-assign]
