"""What a Python process that a benchmark starts needs to find the same code as this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent


def environment(**more: str) -> dict[str, str]:
    """The variables of this process, with ``more``, so that the other imports what this one can, installed or not."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more


def environment_of(python: str, **more: str) -> dict[str, str]:
    """`environment` for the interpreter at the path ``python``.

    Another one than this gets the library and the benchmarks only: packages of this one may not fit it.
    """
    if python == sys.executable:
        return environment(**more)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCH.parent), str(BENCH)])} | more
