"""Environment variables that switch something on or off: the values that mean no.

Any room may call this one. The caller names the variable, and knows what it switches.
"""

from __future__ import annotations

import os


def says_no(variable: str) -> bool:
    """True if the environment variable is set to ``0``, ``false``, ``no`` or ``off``, in upper or lower case."""
    return os.environ.get(variable, "").lower() in ("0", "false", "no", "off")
