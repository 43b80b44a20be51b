"""Recordings: every launch is there with what it reads, writes and moves, and nothing else is."""

import threading

import pytest
import torch

from at_once import in_threads
from dataparallel import DataParallel
from like_the_cpu import DEVICE as ONE
from like_the_cpu import OTHER as TWO
from nets import Net
from nogpu.timeline import HOST, Launch, StreamName

pytestmark = pytest.mark.devices("sim")


def recorded(function, *arguments) -> tuple[Launch, ...]:
    """The launches of a call."""
    with torch.sim.timeline() as timeline:
        function(*arguments)
    return timeline.recording.launches


def only(function, *arguments) -> Launch:
    (launch,) = recorded(function, *arguments)
    return launch


# What is a launch


@pytest.mark.smoke
def test_launches_are_in_their_order_and_have_names():
    x = torch.ones(4, 4, device=ONE)
    launches = recorded(lambda: (x * 2).t().exp().sum().item())
    assert [launch.op for launch in launches] == [
        "aten::mul",
        "aten::exp",
        "aten::sum",
        "aten::_local_scalar_dense",
    ]
    assert [launch.index for launch in launches] == [0, 1, 2, 3]


# Streams


def test_streams_are_named_in_the_order_of_their_first_launches(stream):
    x, y = torch.ones(3, device=ONE), torch.ones(3, device=TWO)
    with torch.sim.timeline() as timeline:
        y + 1
        with torch.sim.stream(stream):
            torch.ones(3, device=ONE)
        x + 1
        y + 1
    assert timeline.recording.streams == (StreamName(2, 0), StreamName(1, stream.stream_id), StreamName(1, 0))
    assert [launch.stream for launch in timeline.recording.launches] == [0, 1, 2, 0]


# Bytes, shapes, types


@pytest.mark.parametrize(
    ("function", "read", "written"),
    [
        (lambda x: x + x, 32, 16),
        (lambda x: x.add_(x), 32, 16),
        (lambda x: x.fill_(3), 0, 16),
        (lambda x: x.zero_(), 0, 16),
        (lambda x: x.normal_(), 0, 16),
        (lambda x: torch.add(x, x, out=torch.empty(2, 2, device=ONE)), 32, 16),
        (lambda x: torch.arange(5, device=ONE, out=torch.empty(0, dtype=torch.int64, device=ONE)), 0, 40),
        (lambda x: x.t() @ x, 32, 16),
        (lambda x: x.to(torch.float64), 16, 32),
        (lambda x: x.sort(), 16, 16 + 32),
        (lambda x: torch.cat([x, x, x]), 48, 48),
        (lambda x: x[0, 0].item(), 4, 4),
        (lambda x: torch._foreach_zero_([x]), 0, 16),
        (lambda x: torch._foreach_add_([x, x[0]], [x, x[0]]), 48, 24),
        (lambda x: torch.empty(2, 2, dtype=torch.float64, device=TWO).copy_(x), 16, 32),
        (lambda x: x.sum(), 16, 4),
    ],
)
def test_bytes_are_those_of_what_is_read_and_written(function, read, written):
    launch = recorded(function, torch.ones(2, 2, device=ONE))[-1]
    assert (launch.bytes_read, launch.bytes_written) == (read, written)


def test_shapes_are_those_of_the_tensor_arguments():
    launch = only(torch.addmm, *(torch.ones(size, device=ONE) for size in [(5,), (3, 4), (4, 5)]))
    assert launch.shapes == ((5,), (3, 4), (4, 5))
    assert only(lambda: torch.ones((), device=ONE)).shapes == ((),)
    lists = [torch.ones(2, device=ONE), torch.ones(3, device=ONE)]
    assert only(torch._foreach_add_, lists, lists).shapes == ((2,), (3,), (2,), (3,))


def test_the_type_is_that_of_the_largest_tensor():
    x = torch.ones(100, dtype=torch.float64, device=ONE)
    indices = torch.zeros(3, dtype=torch.int64, device=ONE)
    assert only(x.index_select, 0, indices).dtype == "float64"
    assert only(x[:1].index_select, 0, indices[:1].expand(2)).dtype == "int64"
    assert only(x.to, torch.bfloat16).dtype == "float64"
    assert only(x.to, torch.complex128).dtype == "complex128"


# Copies


@pytest.mark.parametrize(
    ("function", "ends"),
    [
        (lambda x: x.to(TWO), (1, 2)),
        (lambda x: x.to(TWO, non_blocking=True), (1, 2)),
        (lambda x: x.cpu(), (1, HOST)),
        (lambda x: torch.ones(3).to(ONE), (HOST, 1)),
        (lambda x: x[0].item(), (1, HOST)),
        (lambda x: x.clone(), None),
        (lambda x: x.to(torch.float64), None),
    ],
)
def test_a_copy_has_two_ends(function, ends):
    assert only(function, torch.ones(3, device=ONE)).copy == ends


# Blocks


def test_there_is_one_block_at_a_time():
    def second(*_):
        with pytest.raises(RuntimeError, match="one timeline at a time"), torch.sim.timeline():
            pass

    with torch.sim.timeline() as timeline:
        second()
        in_threads(1, second)
        torch.ones(3, device=ONE)
    assert len(timeline.recording.launches) == 1


def test_the_recording_is_there_after_the_block():
    with torch.sim.timeline() as timeline, pytest.raises(RuntimeError, match="leave the block"):
        _ = timeline.recording
    assert timeline.recording.launches == ()


def test_a_block_that_raises_has_ended():
    made = []

    def fails():
        with torch.sim.timeline() as timeline:
            made.append(timeline)
            torch.ones(3, device=ONE)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert [launch.op for launch in made[0].recording.launches] == ["aten::fill_"]
    assert recorded(torch.sim.synchronize, ONE) == ()


def test_more_launches_than_the_limit_raise():
    x = torch.ones(3, device=ONE)
    made = []

    def fails():
        with torch.sim.timeline(limit=3) as timeline:
            made.append(timeline)
            for _ in range(4):
                x.add_(1)
            made.append("went on")

    with pytest.raises(RuntimeError, match=r"more than 3 launches.*torch\.sim\.timeline\(limit=3\)"):
        fails()
    with pytest.raises(RuntimeError, match="more than 3 launches"):
        _ = made[0].recording
    assert made[1] == "went on"
    assert x.tolist() == [5, 5, 5]
    assert len(recorded(x.add_, 1)) == 1


@pytest.mark.parametrize(
    ("limit", "error", "words"),
    [
        (0, ValueError, "at least 1; got 0"),
        (None, TypeError, "NoneType"),
        (1.5, TypeError, "float"),
        (True, TypeError, "bool"),
    ],
)
def test_a_limit_is_an_int_of_at_least_one(limit, error, words):
    with pytest.raises(error, match=words), torch.sim.timeline(limit=limit):
        pass


def test_stacks_are_kept_where_they_are_asked_for():
    x = torch.ones(3, device=ONE)
    assert only(x.add_, 1).stack == ""
    with torch.sim.timeline(stacks=True) as timeline:
        x.add_(1)
    assert "test_stacks_are_kept_where_they_are_asked_for" in timeline.recording.launches[0].stack


def test_host_time_is_that_of_the_thread_between_launches():
    x = torch.ones(3, device=ONE)
    with torch.sim.timeline() as timeline:
        x.add_(1)
        sum(range(2_000_000))
        x.add_(1)
        x.add_(1)
        threading.Event().wait(0.05)
        x.add_(1)
    _, worked, at_once, slept = (launch.host_seconds for launch in timeline.recording.launches)
    assert worked > 10 * at_once > 0
    assert slept < worked


# Whole steps


@pytest.mark.parametrize("clocks", [True, False])
def test_a_step_on_eight_devices_is_recorded_as_it_is_counted_and_names_earlier_launches_only(clocks):
    devices = [torch.device("sim", index) for index in range(8)]
    model, x = DataParallel(Net().to(devices[0]), devices), torch.randn(16, 4, dtype=torch.float64)
    with torch.sim.clocks(clocks), torch.sim.counted() as counts, torch.sim.timeline() as timeline:
        for _ in range(2):
            model(x).abs().sum().backward()
    launched, copied = [0] * len(counts.launches), {}
    recording = timeline.recording
    for launch in recording.launches:
        launched[recording.streams[launch.stream].device] += 1
        if launch.copy:
            copied[launch.copy] = copied.get(launch.copy, 0) + launch.bytes_written
    assert launched == counts.launches
    assert copied == {ends: count for ends, count in counts.copied.items() if count}
    assert min(launched) > 10
    for launch in recording.launches:
        assert all(0 <= index < launch.index for index in (*launch.waits, *launch.host_waits, *launch.issued_after))
        assert all(recording.launches[index].stream != launch.stream for index in launch.waits)
        assert all(recording.launches[index].thread != launch.thread for index in launch.issued_after)
    assert any(launch.in_backward for launch in recording.launches)
