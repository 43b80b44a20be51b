"""``torch.sim.launch_rows``: a kernel that reads peers is one launch, with bytes by peer; clocks see all of it.

The tests of tables (`comm.test_tables`) have its numbers.
"""

from __future__ import annotations

import pytest
import torch

from clocked import check_clocks, counted

pytestmark = [pytest.mark.devices("sim"), pytest.mark.slots(3)]


def rows(*given: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(given, dtype=torch.int64)


def settle(slots: list) -> None:
    for slot in slots:
        torch.sim.synchronize(slot)


def test_it_is_one_launch_with_the_bytes_of_each_peer(slots: list) -> None:
    terms = [torch.ones(8, device=slot) for slot in slots]
    target = torch.zeros(8, device=slots[0])
    settle(slots)
    with counted() as counts:
        torch.sim.launch_rows("sum", rows((3, 0, 4, 0, 0, 1, 0, 2, 0)), [*terms, target])
    assert [counts.launches[slot.index] for slot in slots] == [1, 0, 0]
    assert counts.copied == {(slots[1].index, slots[0].index): 16, (slots[2].index, slots[0].index): 16}
    settle(slots)


def test_a_read_that_nothing_orders_is_a_race(slots: list) -> None:
    source, target = torch.ones(4, device=slots[1]), torch.zeros(4, device=slots[0])
    settle(slots)
    source.add_(1)
    with pytest.raises(RuntimeError, match="race: pull reads its argument 'term' in sim:1"):
        torch.sim.launch_rows("pull", rows((1, 0, 4, 0, 0)), [source, target])
    torch.sim.synchronize(slots[1])
    torch.sim.launch_rows("pull", rows((1, 0, 4, 0, 0)), [source, target])
    with pytest.raises(RuntimeError, match=r"race: aten::add_.*pull"):
        source.add_(1)
    torch.sim.synchronize(slots[0])
    check_clocks()
