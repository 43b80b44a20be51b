"""`warn_user` and `warn_once`: warnings that show the line of the user's code. `is_of_user` finds it."""

from __future__ import annotations

import inspect
import traceback
import warnings
from types import FrameType

_said: dict[str, object] = {}


def warn_once(kind: str, message: str) -> None:
    """Warns of a ``kind`` the first time in this process."""
    # setdefault is atomic: of several threads only one finds its own object. A lock could be held during a fork.
    this_call = object()
    if _said.setdefault(kind, this_call) is this_call:
        warn_user(message)


def warn_user(message: str) -> None:
    """Warns at the line of the first caller that is neither in this library nor in torch."""
    warnings.warn(message, UserWarning, stacklevel=_level_of_user())


def _level_of_user() -> int:
    for level, (frame, _) in enumerate(traceback.walk_stack(inspect.currentframe())):
        if is_of_user(frame):
            return level
    return 1


def is_of_user(frame: FrameType) -> bool:
    """True for code that is neither in this library nor in torch."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in ("torch", "dataparallel")
