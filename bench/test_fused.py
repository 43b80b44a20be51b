"""Recordings made by hand, in which neighbouring kernels become one. Nothing is simulated or timed here."""

from __future__ import annotations

from typing import Any

import pytest

from fused import as_python, fused, without_lock
from nogpu.timeline import Launch, Recording, StreamName, schedule
from nogpu.timeline.presets import A100


def launch(index: int, op: str = "aten::add", thread: int = 0, stream: int = 0, **changes: Any) -> Launch:
    values: dict[str, Any] = {
        "index": index,
        "op": op,
        "thread": thread,
        "in_backward": False,
        "stream": stream,
        "bytes_read": 100,
        "bytes_written": 10,
        "flops": 0,
        "dtype": "float32",
        "shapes": (),
        "copy": None,
        "waits": (),
        "joins": None,
        "host_waits": (),
        "issued_after": (),
        "host_seconds": 0.001,
    }
    return Launch(**(values | changes))


def recording(*launches: Launch) -> Recording:
    return Recording((StreamName(0, 0), StreamName(1, 0)), launches)


def names(found: Recording) -> list[str]:
    return [one.op for one in found.launches]


def test_neighbours_become_one() -> None:
    found = fused(recording(launch(0), launch(1), launch(2, "aten::mul", host_seconds=0.004)))
    (one,) = found.launches
    assert (one.op, one.bytes_read, one.bytes_written) == ("fused aten::mul", 300, 30)
    assert one.host_seconds == pytest.approx(0.002)


def test_products_and_copies_stay() -> None:
    copy = launch(2, "aten::_copy_from", copy=(0, 1))
    found = fused(recording(launch(0), launch(1, "aten::addmm"), copy, launch(3), launch(4)))
    assert names(found) == ["aten::add", "aten::addmm", "aten::_copy_from", "fused aten::add"]


def test_what_waits_begins_anew() -> None:
    other = launch(1, thread=1, stream=1)
    found = fused(recording(launch(0), other, launch(2, waits=(1,)), launch(3)))
    assert [one.waits for one in found.launches] == [(), (), (1,)]


def test_a_part_that_is_waited_for_is_the_last_of_its_group() -> None:
    """The other stream would wait for what comes after it."""
    found = fused(recording(launch(0), launch(1), launch(2, thread=1, stream=1, waits=(1,)), launch(3)))
    assert names(found) == ["fused aten::add", "aten::add", "aten::add"]
    assert found.launches[1].waits == (0,)


def test_two_threads_on_one_stream_are_not_merged() -> None:
    found = fused(recording(launch(0), launch(1, thread=1), launch(2), launch(3, thread=1)))
    assert len(found.launches) == 4


def test_threads_on_their_own_streams_are_merged_beside_each_other() -> None:
    found = fused(recording(launch(0), launch(1, thread=1, stream=1), launch(2), launch(3, thread=1, stream=1)))
    assert [(one.thread, one.bytes_read) for one in found.launches] == [(0, 200), (1, 200)]


def test_fewer_launches_take_no_longer() -> None:
    before = recording(*(launch(index, "aten::mm" if index % 5 == 0 else "aten::add") for index in range(50)))
    after = fused(before)
    assert len(after.launches) == 20
    assert schedule(after, A100).time < schedule(before, A100).time


def test_a_compiled_backward_holds_the_lock() -> None:
    found = as_python(
        recording(launch(0, in_backward=True), launch(1, "aten::_copy_from", in_backward=True, copy=(0, 1)))
    )
    assert [one.in_backward for one in found.launches] == [False, True]


def test_a_wrapper_in_cpp_holds_no_lock() -> None:
    found = without_lock(recording(launch(0), launch(1, "aten::_copy_from", copy=(0, 1))))
    assert [one.in_backward for one in found.launches] == [True, False]
