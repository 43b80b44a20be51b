"""Recordings: what a launch's stream and its thread have waited for, and which threads came before its thread.

All of this is true with the clocks and without them.
"""

import os

import pytest
import torch

from at_once import in_threads
from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO
from processes import run_script

pytestmark = pytest.mark.devices("sim")


@pytest.fixture(params=[True, False], ids=["clocks", "no clocks"], autouse=True)
def with_and_without_clocks(request):
    with torch.sim.clocks(request.param):
        yield
        torch.sim.synchronize(ONE)
        torch.sim.synchronize(TWO)


def launch_on(stream):
    """A launch that uses no memory of any other."""
    with torch.sim.stream(stream):
        torch.ones(2, device=stream.device)


def streams(count):
    return [torch.Stream(ONE) for _ in range(count)]


def waits(recording):
    return [launch.waits for launch in recording.launches]


def host_waits(recording):
    return [launch.host_waits for launch in recording.launches]


def in_thread(work):
    in_threads(1, lambda *_: work())


# Streams

# Steps: ``a`` is a launch on the stream a, ``a>b`` lets b wait for a, and ``-a`` is on a but is no launch.
ORDERS = {
    "a stream waits for a stream": ("a a a>b b b", [(), (), (1,), ()]),
    "a wait for nothing new is no wait": ("a a>b b a>b b", [(), (0,), ()]),
    "waits pass through streams that launch nothing": ("a a>b b>c c>d d", [(), (0,)]),
    "waits for several streams": ("a b a>c b>c c", [(), (), (0, 1)]),
    "a wait for what is no launch is one for the launch before": ("a -a a>b b", [(), (0,)]),
    "of two waits for a stream the later one counts": ("a a>b -b a a>b -b b", [(), (), (1,)]),
}


@pytest.mark.parametrize(("steps", "expected"), ORDERS.values(), ids=ORDERS)
def test_streams_wait_for_streams(steps, expected):
    by_name = dict(zip("abcd", streams(4), strict=True))
    empty = torch.empty(0, device=ONE)
    with torch.sim.timeline() as timeline:
        for step in steps.split():
            if ">" in step:
                by_name[step[2]].wait_stream(by_name[step[0]])
            elif step.startswith("-"):
                with torch.sim.stream(by_name[step[1]]):
                    empty + 1
            else:
                launch_on(by_name[step])
    assert waits(timeline.recording) == expected
    assert host_waits(timeline.recording) == [()] * len(expected)


def test_a_stream_waits_for_an_event_from_its_record_on():
    a, b = streams(2)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        event = a.record_event()
        launch_on(a)
        b.wait_event(event)
        launch_on(b)
    assert waits(timeline.recording) == [(), (), (0,)]


def test_launches_before_the_recording_are_left_out():
    a, b = streams(2)
    launch_on(a)
    event = a.record_event()
    with torch.sim.timeline() as timeline:
        b.wait_event(event)
        torch.sim.synchronize(ONE)
        launch_on(b)
    assert waits(timeline.recording) == host_waits(timeline.recording) == [()]


# Copies


def test_a_copy_between_devices_waits_for_both_streams_and_both_wait_for_it():
    x, y = torch.ones(2, device=ONE), torch.ones(2, device=TWO)
    with torch.sim.timeline() as timeline:
        x.add_(1)
        y.add_(1)
        y.copy_(x)
        y.add_(1)
        x.add_(1)
    recording = timeline.recording
    assert recording.launches[2].joins == recording.launches[1].stream
    assert recording.launches[2].stream == recording.launches[0].stream
    assert waits(recording) == [(), (), (1,), (2,), ()]
    assert [launch.joins for launch in recording.launches if launch.index != 2] == [None] * 4


def test_a_copy_waits_for_what_the_stream_of_its_target_waits_for():
    (side,) = streams(1)
    x, y = torch.ones(2, device=ONE), torch.ones(2, device=TWO)
    with torch.sim.timeline() as timeline:
        launch_on(side)
        torch.sim.current_stream(TWO).wait_stream(side)
        y.copy_(x)
    assert waits(timeline.recording) == [(), (0,)]


# The host


@pytest.mark.parametrize(
    "wait",
    [
        lambda stream: stream.synchronize(),
        lambda stream: stream.record_event().synchronize(),
        lambda stream: torch.sim.synchronize(stream.device),
    ],
)
def test_the_host_waits(wait):
    a, b = streams(2)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        wait(a)
        launch_on(b)
        launch_on(b)
    assert waits(timeline.recording) == [(), (), ()]
    assert host_waits(timeline.recording) == [(), (0,), ()]


@pytest.mark.parametrize("ask", [lambda stream: stream.query(), lambda stream: stream.record_event().query()])
def test_a_question_is_no_wait(ask):
    """Neither the question nor what is known by the answer. A wait before it stays one."""
    a, b, c = streams(3)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        launch_on(b)
        a.synchronize()
        launch_on(a)
        ask(a)
        ask(b)
        launch_on(c)
        a.synchronize()
        launch_on(c)
    assert waits(timeline.recording) == [()] * 5
    assert host_waits(timeline.recording) == [(), (), (0,), (), ()]
    with torch.sim.timeline() as timeline:
        launch_on(a)
        a.synchronize()
        ask(a)
        launch_on(c)
    assert host_waits(timeline.recording) == [(), (0,)]


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x.cpu(), lambda x: x.nonzero()])
def test_reading_a_value_waits(read):
    x, y = torch.ones((), device=ONE), torch.ones(2, device=TWO)
    with torch.sim.timeline() as timeline:
        read(x)
        y.add_(1)
        y.add_(1)
    assert host_waits(timeline.recording)[-2:] == [(len(timeline.recording.launches) - 3,), ()]


def test_a_copy_to_pinned_memory_waits_for_nothing():
    x, y = torch.ones(2, device=ONE), torch.ones(2, device=TWO)
    host = torch.empty(2).pin_memory()
    with torch.sim.timeline() as timeline:
        host.copy_(x, non_blocking=True)
        y.add_(1)
    assert host_waits(timeline.recording) == [(), ()]


def test_what_a_thread_has_waited_for_is_waited_for_by_those_that_it_starts_and_that_join_it():
    a, b, c = streams(3)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        a.synchronize()
        in_thread(lambda: (launch_on(b), b.synchronize()))
        launch_on(c)
    assert host_waits(timeline.recording) == [(), (0,), (0, 1)]


# Threads


def test_a_thread_is_issued_after_its_start_and_before_its_join():
    a, b = streams(2)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        launch_on(a)
        in_thread(lambda: (launch_on(b), launch_on(b)))
        launch_on(a)
        launch_on(a)
    assert [launch.issued_after for launch in timeline.recording.launches] == [(), (), (1,), (), (3,), ()]
    assert host_waits(timeline.recording) == [()] * 6


def test_threads_beside_each_other_are_not_ordered_and_who_joins_them_is_after_the_last_launch_of_each():
    """Not even if the launches of one came first by luck."""
    a, b, c = streams(3)

    def work(index, barrier):
        if index == 1:
            barrier.wait()
        launch_on((a, b)[index])
        if index == 0:
            barrier.wait()

    with torch.sim.timeline() as timeline:
        in_threads(2, work)
        launch_on(c)
    assert [launch.issued_after for launch in timeline.recording.launches] == [(), (), (0, 1)]


# Backward


def test_threads_of_a_backward():
    x = torch.ones(2, device=ONE, requires_grad=True)
    with torch.sim.timeline() as timeline:
        loss = ((x * 2).to(TWO) * 3).sum()
        loss.backward()
        x.detach().add_(1)
    launches = timeline.recording.launches
    inside = [launch for launch in launches if launch.in_backward]
    last_before = min(launch.index for launch in inside) - 1
    assert launches[last_before].thread == launches[-1].thread == 0
    assert {launch.thread for launch in inside} == {1, 2}
    assert not any(launch.in_backward for launch in launches if launch.thread == 0)
    first = {launch.thread: launch for launch in reversed(inside)}
    last = {launch.thread: launch.index for launch in inside}
    # Each is issued after the call of backward. Nothing orders them among each other, and the caller is after both.
    assert {launch.issued_after for launch in first.values()} == {(last_before,)}
    assert all(launch.issued_after == () for launch in inside if launch is not first[launch.thread])
    assert launches[-1].issued_after == tuple(sorted(last.values()))


def test_threads_that_are_started_after_a_backward_know_of_it():
    x = torch.ones(2, device=ONE, requires_grad=True)
    (a,) = streams(1)
    with torch.sim.timeline() as timeline:
        (x * 2).sum().backward()
        in_thread(lambda: launch_on(a))
    launches = timeline.recording.launches
    inside = [launch.index for launch in launches if launch.in_backward]
    assert inside[-1] in launches[-1].issued_after


# The recording itself


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_that_is_forked_inside_a_block_begins_anew():
    script = """
import os
import torch
from nogpu import simulate

(device,) = simulate(1)
with torch.sim.timeline(limit=1) as timeline:
    torch.ones(2, device=device)
    child = os.fork()
    if child == 0:
        torch.ones(2, device=device)
        with torch.sim.timeline() as own:
            torch.ones(2, device=device)
        assert len(own.recording.launches) == 1, own.recording.launches
if child == 0:  # the block of the parent was left without an error, although there were more launches than the limit
    try:
        timeline.recording
    except RuntimeError as error:
        assert "forked child" in str(error), error
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert len(timeline.recording.launches) == 1
print("both are done", flush=True)
"""
    assert run_script(script) == "both are done\n"
