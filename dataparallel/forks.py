"""`in_forked_child`: what a forked child resets, because no thread of the parent exists there. `main_is_the_program`.

Children reset threads, locks that a thread of the parent may have held, and what the parent knew of its devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def in_forked_child(function: Callable[[], None]) -> Callable[[], None]:
    """A decorator: each child that this process forks first calls the function. Without effect on Windows."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


@contextmanager
def main_is_the_program() -> Iterator[None]:
    """Around a program that ``runpy`` runs: objects of its classes can come from spawned processes.

    These processes run the program under the name ``__mp_main__``, and pickle its classes by this name. In this
    process it would mean the command that runs the program.
    """
    before = sys.modules.get("__mp_main__")
    sys.modules["__mp_main__"] = _Main("__main__")
    try:
        yield
    finally:
        if before is None:
            del sys.modules["__mp_main__"]
        else:
            sys.modules["__mp_main__"] = before


class _Main(ModuleType):
    """Has the names of the program that runs: ``runpy`` makes its module, and takes it away."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["__main__"], name)
