"""Recordings: which thread has made a launch, and which threads came before it.

All of this is true with the clocks and without them.
"""

import os

import pytest
import torch

from at_once import in_threads
from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO
from processes import run_script
from recorded_orders import host_waits, in_thread, launch_on, streams

pytestmark = [pytest.mark.devices("sim"), pytest.mark.usefixtures("with_and_without_clocks")]


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
