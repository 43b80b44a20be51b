"""What simulated devices and a stand-in for CUDA both offer to tests: clocks, counts and timelines. GPUs have none.

Tests that need them are marked ``devices("sim", "stand-in")``.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

from nogpu import cuda


def _front() -> Any:
    return cuda if cuda.is_stand_in() else torch.sim


def check_clocks() -> None:
    """Raises what the clocks have found and could not raise at once. Where there are none, it does nothing."""
    if cuda.is_stand_in() or hasattr(torch, "sim"):
        _front().check_clocks()


def counted() -> AbstractContextManager[Any]:
    """Counts launches and copied bytes while inside."""
    return _front().counted()


def timeline() -> AbstractContextManager[Any]:
    """Records every launch while inside."""
    return _front().timeline()
