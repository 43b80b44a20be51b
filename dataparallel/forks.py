"""`in_forked_child`: what a forked child resets, because no thread of the parent exists there.

Children reset threads, locks that a thread of the parent may have held, and what the parent knew of its devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable


def in_forked_child(function: Callable[[], None]) -> Callable[[], None]:
    """A decorator: each child that this process forks first calls the function. Without effect on Windows."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function
