"""The operators of the manual's table do over machines what they do with as many owners on one."""

import pytest

from dataparallel.testing.sharding import Checked
from fake_machines import FakeOver, on_fake_machines, owners_of
from swept_operators import RANKS, checked, on_sharded_tensors, swept


@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.slots(RANKS)
@pytest.mark.parametrize("machines", [2, 4])
def test_they_are_right_or_refused_alike(slots: list, machines: int) -> None:
    def sweep(over: FakeOver) -> dict[str, Checked]:
        return {one.name: checked(one, owners_of(slots, over)) for one in swept()}

    expected = on_sharded_tensors(slots)
    for found in on_fake_machines(sweep, machines):
        for name, counts in found.items():
            assert (name, counts.right, counts.refused, counts.wrong) == (
                name,
                expected[name].right,
                expected[name].refused,
                0,
            )
