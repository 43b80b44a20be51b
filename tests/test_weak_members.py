"""`WeakMembers` keeps nobody alive, and one thread may walk through it while others add and drop members."""

import gc
import threading

import pytest

from at_once import in_threads
from dataparallel.weak_members import WeakMembers

pytestmark = pytest.mark.devices("cpu")  # it knows no slots: once is enough


class Member:
    """Equal to all others."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_who_is_gone_is_gone_without_the_collector() -> None:
    members: WeakMembers[Member] = WeakMembers()
    member = Member()
    members.add(member)
    assert members
    gc.collect()
    gc.disable()
    try:
        del member
        assert not members
        other, again = WeakMembers[Member](), Member()
        other.add(again)
        del other, again
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_walk_finds_all_that_stay_while_others_come_and_go() -> None:
    members: WeakMembers[Member] = WeakMembers()
    staying = [Member() for _ in range(20)]
    for each in staying:
        members.add(each)
    found: list[int] = []
    over = threading.Event()

    def work(index: int, barrier: threading.Barrier) -> None:
        barrier.wait()
        if index == 0:
            try:
                for _ in range(300):
                    ids = {id(each) for each in members}
                    found.append(sum(id(each) in ids for each in staying))
            finally:
                over.set()
        while not over.is_set():
            passing = [Member() for _ in range(10)]
            for each in passing:
                members.add(each)

    in_threads(3, work)
    assert {*found} == {20}
    gc.collect()
    assert len([*members]) == 20
