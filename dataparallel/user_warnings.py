"""`warn_user` and `warn_once`: warnings that show the line of the user's code. `PerformanceWarning` is a category.

This file does not import torch, so that ``-W`` options, which Python reads before anything else, can name the category.
"""

from __future__ import annotations

import inspect
import traceback
import warnings

from dataparallel.environment import says_no

VARIABLE = "DATAPARALLEL_PERFORMANCE_WARNINGS"
"""Environment variable: ``0`` switches performance warnings off."""


class PerformanceWarning(UserWarning):
    """A call works, and costs more than it has to. The message names the line to change.

    Each kind comes once in a process. :ref:`warnings-that-help` lists the kinds. The environment variable
    ``DATAPARALLEL_PERFORMANCE_WARNINGS=0`` switches all of them off. To find them in tests, make them errors:
    ``warnings.simplefilter("error", dataparallel.PerformanceWarning)``.
    """


_said: dict[str, object] = {}


def warn_once(kind: str, message: str) -> None:
    """Gives the `PerformanceWarning` of a ``kind`` the first time in this process."""
    # setdefault is atomic: of several threads only one finds its own object. A lock could be held during a fork.
    this_call = object()
    if not says_no(VARIABLE) and _said.setdefault(kind, this_call) is this_call:
        warn_user(message, PerformanceWarning)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the first caller that is neither in this library nor in torch."""
    warnings.warn(message, category, stacklevel=_level_of_user())


def _level_of_user() -> int:
    for level, (frame, _) in enumerate(traceback.walk_stack(inspect.currentframe())):
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "dataparallel.")):
            return level
    return 1
