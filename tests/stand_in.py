"""The marks of tests that need a stand-in for CUDA.

Some start it in processes of their own, once and whatever the devices. Others run on its devices, and not on GPUs.
"""

import re

import pytest

from nogpu.cuda import is_stand_in
from nogpu.cuda.possible import why_not_here

WHY_NOT = why_not_here()

needs_stand_in = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

IN_OWN_PROCESSES = [pytest.mark.devices("cpu"), needs_stand_in]

STAND_IN = "stand-in"  # in the marker `devices`


def fits(marker: pytest.Mark, config: pytest.Config) -> bool:
    """True if this run's devices are of a kind that the marker `devices` names."""
    kind = config.option.devices
    return kind in marker.args or (STAND_IN in marker.args and kind == "cuda" and is_stand_in())


def programs(table: str) -> pytest.MarkDecorator:
    """Runs a test with each ``program`` of a table, which begins with a line ``#: its name``."""
    _, *parts = re.split(r"^#: (.*)\n", table, flags=re.MULTILINE)
    rows = zip(parts[::2], parts[1::2], strict=True)
    return pytest.mark.parametrize("program", [pytest.param(program, id=name) for name, program in rows])
