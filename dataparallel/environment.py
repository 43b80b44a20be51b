"""Environment variables that switch something on or off: the values that mean no, and those that mean yes."""

from __future__ import annotations

import os

_NO, _YES = ("0", "false", "no", "off"), ("1", "true", "yes", "on")


def says_no(variable: str) -> bool:
    """True if the environment variable says no, in upper or lower case. Raises ``ValueError`` for other words."""
    value = os.environ.get(variable, "")
    if value.lower() not in ("", *_NO, *_YES):
        raise ValueError(f"{variable}={value!r}: expected {', '.join((*_NO, *_YES))}, or nothing")
    return value.lower() in _NO
