"""Recordings: what a launch's stream has waited for, and what its thread has waited for.

All of this is true with the clocks and without them.
"""

import pytest
import torch

from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO
from recorded_orders import host_waits, in_thread, launch_on, streams, waits

pytestmark = [pytest.mark.devices("sim"), pytest.mark.usefixtures("with_and_without_clocks")]


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
