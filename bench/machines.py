"""Starts processes that train together, and compares what they have. `machine_contender` is the script that they run.

Times and judges nothing: `test_machines.py` times, `machines_report.py` judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from counted_group import BACKEND as COUNTED
from cpu_slots import Contender
from gradients import assert_same_gradients

SCRIPT = Path(__file__).with_name("machine_contender.py")
STEPS_BEFORE_COUNTING = 3  # in the second step DDP, and so do we, changes the order of buckets


def ranks(
    name: str, folder: Path, ways: Sequence[str], count: int = 2, slots: int = 1, counted: bool = False
) -> Contender:
    """``count`` processes with ``slots`` CPU slots each, which make steps by all of ``ways``.

    With ``counted`` they count what they send: see `counted_group`.
    """
    backend = COUNTED if counted else "gloo"
    file = str(folder / f"{name} rendezvous")
    arguments = [[str(rank), str(count), file, backend, str(slots), *ways] for rank in range(count)]
    return Contender(name, arguments, folder, SCRIPT)


def of_ranks(contender: Contender) -> dict[str, list[dict[str, Any]]]:
    """By way: what each rank has. Raises `AssertionError` unless all ranks have the same gradients, bit by bit."""
    found = contender.saved()
    for by_rank in found.values():
        for other in by_rank[1:]:
            for gradient, expected in zip(other["whole_gradients"], by_rank[0]["whole_gradients"], strict=True):
                torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises `AssertionError` unless two ranks, of two ways, have the same gradients up to rounding."""
    assert_same_gradients(found["whole_gradients"], expected["whole_gradients"])
