"""Recordings: what a launch's stream has waited for, what its thread has waited for, and which threads came before."""

import os

import pytest
import torch

from at_once import in_threads
from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO
from processes import run_script

pytestmark = pytest.mark.devices("sim")


@pytest.fixture(params=[True, False], ids=["clocks", "no clocks"], autouse=True)
def _clocks(request):
    """All of this is true with the clocks and without them."""
    with torch.sim.clocks(request.param):
        yield
        torch.sim.synchronize(ONE)
        torch.sim.synchronize(TWO)


def launch_on(stream):
    """A launch that uses no memory of any other."""
    with torch.sim.stream(stream):
        torch.ones(2, device=stream.device)


def streams(count, device=1):
    return [torch.Stream(torch.device("sim", device)) for _ in range(count)]


def waits(recording):
    return [launch.waits for launch in recording.launches]


def host_waits(recording):
    return [launch.host_waits for launch in recording.launches]


# Streams


def test_a_stream_waits_for_a_stream():
    a, b = streams(2)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        launch_on(a)
        b.wait_stream(a)
        launch_on(b)
        launch_on(b)
    assert waits(timeline.recording) == [(), (), (1,), ()]
    assert host_waits(timeline.recording) == [()] * 4


def test_a_stream_waits_for_an_event_from_its_record_on():
    a, b = streams(2)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        event = a.record_event()
        launch_on(a)
        b.wait_event(event)
        launch_on(b)
    assert waits(timeline.recording) == [(), (), (0,)]


def test_a_wait_for_nothing_new_is_no_wait():
    a, b = streams(2)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        b.wait_stream(a)
        launch_on(b)
        b.wait_stream(a)
        launch_on(b)
    assert waits(timeline.recording) == [(), (0,), ()]


def test_waits_pass_through_streams_that_launch_nothing():
    a, b, c, d = streams(4)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        for before, after in [(a, b), (b, c), (c, d)]:
            after.wait_event(before.record_event())
        launch_on(d)
    assert waits(timeline.recording) == [(), (0,)]


def test_waits_for_several_streams():
    a, b, c = streams(3)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        launch_on(b)
        c.wait_stream(a)
        c.wait_stream(b)
        launch_on(c)
    assert waits(timeline.recording) == [(), (), (0, 1)]


def test_waits_pass_through_what_is_no_launch():
    a, b = streams(2)
    x = torch.empty(0, device=ONE)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        b.wait_stream(a)
        with torch.sim.stream(b):
            x + 1
        torch.sim.synchronize(ONE)
        x + 1
        launch_on(b)
    assert waits(timeline.recording) == [(), (0,)]
    assert host_waits(timeline.recording) == [(), (0,)]


def test_a_wait_for_what_is_no_launch_is_one_for_the_launch_before():
    a, b = streams(2)
    x = torch.empty(0, device=ONE)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        with torch.sim.stream(a):
            x + 1
        b.wait_stream(a)
        launch_on(b)
    assert waits(timeline.recording) == [(), (0,)]


def test_of_two_waits_for_a_stream_the_later_one_counts():
    a, b = streams(2)
    x = torch.empty(0, device=ONE)
    with torch.sim.timeline() as timeline:
        for _ in range(2):
            launch_on(a)
            b.wait_stream(a)
            with torch.sim.stream(b):
                x + 1
        launch_on(b)
    assert waits(timeline.recording) == [(), (), (1,)]


def test_launches_before_the_recording_are_left_out():
    a, b = streams(2)
    launch_on(a)
    event = a.record_event()
    with torch.sim.timeline() as timeline:
        b.wait_event(event)
        torch.sim.synchronize(ONE)
        launch_on(b)
    assert waits(timeline.recording) == host_waits(timeline.recording) == [()]


def test_an_operator_that_raises_passes_its_waits_on():
    a, b = streams(2)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        b.wait_stream(a)
        with torch.sim.stream(b), pytest.raises(RuntimeError):
            torch.mm(torch.empty(2, 3, device=ONE), torch.empty(2, 3, device=ONE))
        launch_on(b)
    assert waits(timeline.recording) == [(), (0,)]


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


def test_a_copy_within_a_device_or_to_the_host_joins_nothing():
    x = torch.ones(2, device=ONE)
    with torch.sim.timeline() as timeline:
        x.clone()
        x.cpu()
        torch.ones(2).to(ONE)
    assert [launch.joins for launch in timeline.recording.launches] == [None] * 3


def test_a_copy_waits_for_what_the_stream_of_its_target_waits_for():
    (side,) = streams(1)
    x, y = torch.ones(2, device=ONE), torch.ones(2, device=TWO)
    with torch.sim.timeline() as timeline:
        launch_on(side)
        torch.sim.current_stream(TWO).wait_stream(side)
        y.copy_(x)
    assert waits(timeline.recording) == [(), (0,)]


def test_a_stream_that_only_received_is_named():
    x, y = torch.ones(2, device=ONE), torch.ones(2, device=TWO)
    with torch.sim.timeline() as timeline:
        y.copy_(x)
    recording = timeline.recording
    assert [recording.streams[position].device for position in (recording.launches[0].stream, 1)] == [1, 2]
    assert recording.launches[0].joins == 1


# The host


@pytest.mark.parametrize(
    "wait",
    [
        lambda stream: stream.synchronize(),
        lambda stream: stream.record_event().synchronize(),
        lambda stream: torch.sim.synchronize(stream.device),
        lambda stream: stream.query(),
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


def test_an_event_tells_what_the_host_knew_when_it_was_recorded_to_streams_only():
    """The stream that records waits for nothing by that."""
    a, b = streams(2)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        a.synchronize()
        b.record_event()
        launch_on(b)
    assert waits(timeline.recording) == [(), ()]
    assert host_waits(timeline.recording) == [(), (0,)]


def in_thread(work):
    in_threads(1, lambda *_: work())


def test_what_a_thread_has_waited_for_is_waited_for_by_those_that_it_starts_and_that_join_it():
    a, b, c = streams(3)
    with torch.sim.timeline() as timeline:
        launch_on(a)
        a.synchronize()
        in_thread(lambda: (launch_on(b), b.synchronize()))
        launch_on(c)
    assert host_waits(timeline.recording) == [(), (0,), (0, 1)]


# Threads


def test_threads_are_numbered_in_the_order_of_their_launches():
    a, b = streams(2)
    with torch.sim.timeline() as timeline:
        in_thread(lambda: launch_on(a))
        launch_on(b)
        in_thread(lambda: launch_on(a))
    assert [launch.thread for launch in timeline.recording.launches] == [0, 1, 2]


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


def test_joining_several_threads_is_after_the_last_launch_of_each():
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


def test_threads_that_run_beside_each_other_are_not_ordered():
    """Not even if the launches of one came first by luck."""
    a, b = streams(2)

    def work(index, barrier):
        if index == 1:
            barrier.wait()
        launch_on((a, b)[index])
        if index == 0:
            barrier.wait()

    with torch.sim.timeline() as timeline:
        in_threads(2, work)
    assert [launch.issued_after for launch in timeline.recording.launches] == [(), ()]


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


def test_a_thread_of_a_backward_that_joins_a_thread_is_issued_after_it_and_no_other_is():
    (a,) = streams(1)

    class Starts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            in_thread(lambda: launch_on(a))
            return gradient * 2

    x = torch.ones(2, device=TWO, requires_grad=True)
    with torch.sim.timeline() as timeline:
        loss = (Starts.apply((x * 3).to(ONE)) * 5).sum()
        loss.backward()
    launches = timeline.recording.launches
    (started,) = (launch for launch in launches if launch.op == "aten::fill_" and launch.shapes == ((2,),))
    times_five, times_two, *_, times_three = (
        launch for launch in launches if launch.op == "aten::mul" and launch.in_backward
    )
    assert times_five.thread == times_two.thread != times_three.thread
    assert times_five.index in started.issued_after
    assert not started.in_backward
    assert [launch.index for launch in launches if started.index in launch.issued_after] == [times_two.index]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_leaves_the_recording_of_its_parent():
    with torch.sim.timeline() as timeline:
        torch.ones(2, device=ONE)
        child = os.fork()
        if child == 0:
            torch.ones(2, device=ONE)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        torch.ones(2, device=ONE)
    assert len(timeline.recording.launches) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("opened_by", ["the thread that forks", "another thread"])
def test_a_child_that_is_forked_inside_a_block_begins_anew(opened_by):
    script = """
import os, sys, threading
import torch
from dataparallel.testing import simulate

(device,) = simulate(1)

def record_in_child():
    torch.ones(2, device=device)
    with torch.sim.timeline() as own:
        torch.ones(2, device=device)
    assert len(own.recording.launches) == 1, own.recording.launches
    assert own._process == os.getpid()

def fork():
    child = os.fork()
    if child == 0:
        return True
    assert os.waitpid(child, 0)[1] == 0
    return False

if sys.argv[1] == "another thread":
    entered, done = threading.Event(), threading.Event()
    def other():
        with torch.sim.timeline():
            entered.set()
            done.wait()
    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    if fork():
        record_in_child()
        os._exit(0)
    done.set()
    thread.join()
else:
    with torch.sim.timeline(limit=1) as timeline:
        torch.ones(2, device=device)
        is_child = fork()
        if is_child:
            record_in_child()
            torch.ones(2, device=device)
    if is_child:  # the block of the parent was left without an error, although there were more launches than the limit
        with torch.sim.timeline():
            pass
        try:
            timeline.recording
        except RuntimeError as error:
            assert "forked child" in str(error), error
            os._exit(0)
        os._exit(1)
    assert len(timeline.recording.launches) == 1
print("both are done", flush=True)
"""
    assert run_script(script, opened_by) == "both are done\n"


def test_many_threads_record_at_once():
    def work(index, barrier):
        side = torch.Stream(torch.device("sim", index))
        barrier.wait()
        for _ in range(200):
            launch_on(side)

    with torch.sim.timeline() as timeline:
        in_threads(6, work)
    launches = timeline.recording.launches
    assert len(launches) == 6 * 200
    assert len({(launch.thread, launch.stream) for launch in launches}) == 6
