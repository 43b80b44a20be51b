"""Environment variables that switch something on or off: which of their values mean no.

Any room may call this one. What is switched is the business of the room that names the variable.
"""

from __future__ import annotations

import os

__all__ = ["says_no"]


def says_no(variable: str) -> bool:
    """Whether the environment variable is set to ``0``, ``false``, ``no`` or ``off``, in whatever case."""
    return os.environ.get(variable, "").lower() in ("0", "false", "no", "off")
