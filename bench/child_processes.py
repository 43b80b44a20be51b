"""What a Python process that a benchmark starts needs to find the same code as this one."""

from __future__ import annotations

import os
import sys


def environment(**more: str) -> dict[str, str]:
    """The variables of this process, with ``more``, so that the other imports what this one can, installed or not."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more
