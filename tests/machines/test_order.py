"""Processes that belong to several groups issue what these send without a circle of waits, whatever is ready first."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dataparallel.machines.launcher import Order
from nccl_on_machines import has_circle

MESH = {"rows": [(0, 1), (2, 3)], "columns": [(0, 2), (1, 3)], "all": [(0, 1, 2, 3)]}
CIRCLE = {"ring": [(0, 1), (1, 2), (2, 3), (3, 0)]}
pytestmark = pytest.mark.devices("cpu")  # nothing is sent: once is enough

Lines = dict[str, tuple[int, ...]]


def lines_of(groups: dict[str, list[tuple[int, ...]]], purposes: int) -> Lines:
    named = [(f"{name} {ranks} {i}", ranks) for name, rows in groups.items() for ranks in rows for i in range(purposes)]
    return dict(named)


class Simulated:
    """Processes whose launchers take steps in a random order, and whose items become ready at random times.

    A process issues the items of a queue one after the other, each when all ranks of the queue have it.
    """

    def __init__(self, queues: Lines, items: int, seed: int) -> None:
        self.queues, self.items, self.random = queues, items, random.Random(seed)
        self.processes = sorted({rank for ranks in queues.values() for rank in ranks})
        self.orders = {rank: Order() for rank in self.processes}
        self.ready = {(queue, rank): 0 for queue, ranks in queues.items() for rank in ranks}
        self.proposed: dict[tuple[str, int], dict[int, int]] = {}
        self.settled: set[tuple[str, int, int]] = set()
        self.issued: dict[int, list[tuple[str, int]]] = {rank: [] for rank in self.processes}
        self.next = dict.fromkeys(self.ready, 0)

    def run(self) -> dict[int, list[tuple[str, int]]]:
        """What each process has issued, in order. Fails if there is a point at which nobody can go on."""
        while any(number < self.items for number in self.next.values()):
            steps = [step for key in self.ready for step in self.steps(*key)]
            assert steps, "nobody can go on"
            self.random.choice(steps)()
        return self.issued

    def steps(self, queue: str, rank: int) -> list[Callable[[], object]]:
        """What can happen now to a queue in a process."""
        found: list[Callable[[], object]] = []
        key, number, order = (queue, rank), self.next[queue, rank], self.orders[rank]
        if self.ready[key] < self.items:
            found.append(lambda: self.ready.update({key: self.ready[key] + 1}))
        if number == self.items:
            return found
        proposals = self.proposed.setdefault((queue, number), {})
        all_have_it = all(self.ready[queue, other] > number for other in self.queues[queue])
        if all_have_it and rank not in proposals:
            found.append(lambda: proposals.update({rank: order.propose(queue)}))
        elif len(proposals) == len(self.queues[queue]):
            if (queue, number, rank) not in self.settled:
                found.append(lambda: self.settle(queue, number, rank, max(proposals.values())))
            elif order.is_first(queue):
                found.append(lambda: self.issue(queue, number, rank))
        return found

    def settle(self, queue: str, number: int, rank: int, agreed: int) -> None:
        self.settled.add((queue, number, rank))
        self.orders[rank].settle(queue, agreed)

    def issue(self, queue: str, number: int, rank: int) -> None:
        self.orders[rank].leave(queue)
        self.issued[rank].append((queue, number))
        self.next[queue, rank] += 1


@pytest.mark.parametrize("groups", [MESH, CIRCLE], ids=["mesh", "circle"])
@pytest.mark.parametrize("purposes", [1, 3])
def test_there_is_no_circle(groups: dict[str, list[tuple[int, ...]]], purposes: int) -> None:
    for seed in range(12):
        orders = Simulated(lines_of(groups, purposes), 5, seed).run()
        assert not has_circle(orders)


def test_ranks_of_the_same_lines_have_one_order() -> None:
    for seed in range(12):
        first, second = Simulated(lines_of({"pair": [(0, 1)]}, 4), 5, seed).run().values()
        assert first == second


def test_without_numbers_there_would_be_circles() -> None:
    """So the tests above can fail."""
    found = []
    for seed in range(10):
        simulated = Simulated(lines_of(CIRCLE, 1), 5, seed)
        for order in simulated.orders.values():
            order.is_first = lambda queue: True  # type: ignore[method-assign]
        found.append(has_circle(simulated.run()))
    assert any(found)


def test_an_item_that_will_never_be_issued_is_in_nobodys_way() -> None:
    order = Order()
    order.propose("a")
    order.settle("b", order.propose("b"))
    assert not order.is_first("b")
    order.leave("a")
    assert order.is_first("b")
