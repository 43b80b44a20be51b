"""Who writes to shards in host memory waits until no copy reads them, whichever thread noted the copies."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataparallel.comm.streams.current import Event
from dataparallel.sharded import order as operators

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough


class Copy(Event):
    """Ends when it is told to."""

    def __init__(self) -> None:
        self.is_awaited, self.has_ended = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.is_awaited.set()
        assert self.has_ended.wait(30)

    def has_passed(self) -> bool:
        return self.has_ended.is_set()


def test_every_thread_waits_for_a_copy_that_another_one_waits_for_already() -> None:
    copy = Copy()
    operators.note_host_reads([copy])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(operators.wait_for_host_reads)
        assert copy.is_awaited.wait(30)
        copy.is_awaited.clear()
        second = pool.submit(operators.wait_for_host_reads)
        try:
            assert copy.is_awaited.wait(30)
            assert not first.done()
            assert not second.done()
        finally:
            copy.has_ended.set()
        first.result(30)
        second.result(30)


def test_copies_that_have_ended_are_forgotten_if_nobody_writes() -> None:
    for _ in range(10 * operators.MANY_HOST_READS):
        copy = Copy()
        copy.has_ended.set()
        operators.note_host_reads([copy])
    assert len(operators._host_reads) <= operators.MANY_HOST_READS + 1
    operators.wait_for_host_reads()
