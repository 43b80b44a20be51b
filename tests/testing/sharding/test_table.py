"""The manual's table of operators says what they do."""

from __future__ import annotations

import pytest
import torch

from dataparallel.testing.sharding import Checked
from swept_operators import COUNTS, RANKS, on_dtensors, on_sharded_tensors, read_table, rows, swept

pytestmark = pytest.mark.usefixtures("gathers_are_errors")

OF_DTENSORS = ("2.13", "2.15")
"""The torch whose DTensors the table describes."""

NOTHING = Checked(0, 0, 0)


def none() -> dict[str, Checked]:
    return {one.name: NOTHING for one in swept()}


def test_it_has_sixty_operators_of_every_kind() -> None:
    kinds = [row[1] for row in read_table()]
    assert len(kinds) == len({one.name for one in swept()}) == len(swept()) >= 60
    assert {*kinds} == {"pointwise", "reduction", "matmul", "foreach"}


def test_what_it_says_of_sharded_tensors(make_slots) -> None:
    found = rows(on_sharded_tensors(make_slots(RANKS)), none())
    split = 2 + len(COUNTS)
    assert [row[:split] for row in found] == [row[:split] for row in read_table()]
    assert all(row[split - 1] == "0" for row in found)  # nothing is wrong


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_what_it_says_of_dtensors(every: int) -> None:
    found = on_dtensors(every)
    if torch.__version__.startswith(OF_DTENSORS):
        split = 2 + len(COUNTS)
        actual = [row[:2] + row[split:] for row in rows(none(), none() | found)]
        assert actual[::every] == [row[:2] + row[split:] for row in read_table()][::every]
    assert sum(checked.right > 0 for checked in found.values()) >= 60 // every
    assert {name for name, checked in found.items() if checked.wrong} <= {"torch.amax"}
