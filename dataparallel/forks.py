"""What has to begin anew in a forked child, where no thread of the parent lives on, is said with `in_forked_child`.

Any room may call this one: for threads that are gone, for locks that one of them may have held, for what the parent
knew of its devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["in_forked_child"]


def in_forked_child(function: Callable[[], None]) -> Callable[[], None]:
    """A decorator: every child that this process forks calls the function first. Windows has no forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function
