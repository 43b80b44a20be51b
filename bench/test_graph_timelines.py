"""What captured graphs would bring on 8 x A100: predictions, by timelines of a stand-in for CUDA. They are not judged.

``python -m nogpu.cuda -m pytest bench/test_graph_timelines.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from by_hand import launch
from graph_timelines import ALL_REDUCED, GPT_256, INFERENCE, TASKS, predicted
from nogpu import cuda
from nogpu.timeline import HOST, Launch, Recording, StreamName
from process_timelines import Arrival, Unit, buckets_of, changed, ddp, fsdp2, one_graph
from recorded import Recorded
from reporting import Report, Row
from shapes import RealShape

DEVICES, SHORT_DEVICES = 8, 2
MOST_OF_FREE_HOST = 1.15
MOST_CALLS = 60

CAPTION = f"""\
Predictions: nothing here was measured on such devices. Steps were recorded on a stand-in for CUDA that skips kernels,
and scheduled on 8 x A100, the sharded optimizer on 8 x H100 too. Training is forward with a loss in each replica,
backward and a step of SGD, in float32 with TF32; inference is a call without gradients. Each device gets what the name
of the model says.

way
    composable.fully_shard has a unit for each block, and one for the rest. With units="auto" the library chooses them;
    with reshard_after_forward=False it is data parallelism with a sharded optimizer. Gathers and sums are kernels that
    read peers, with the bandwidth of copies; "kernels at 70 %" has 70 % of it. All ways get their batch from pinned
    memory of the host.
graphs
    With graphs=True. The module alone and DDP have their whole step in one graph, which is the best that can be done.
step, free host, ms
    What one more step takes, where the host may run ahead of the devices; and the same if the host's calls cost
    nothing. A launch costs the host 5 to 7 us, and that of a graph 10 to 13 us, however many kernels it has. A kernel
    takes the device 3 us besides its work, also in a graph.
Python, ms
    CPU time of Python's threads between the calls of a step, as measured where it was recorded, and scaled by the
    factor that makes it fit the host above for the module alone. It is not in the other columns: in one process these
    threads share a lock, so a step can hardly take less.
step/free host
    With graphs at most {MOST_OF_FREE_HOST:g} is wanted.
calls
    How often the host launches a kernel, a copy or a graph in a step, for each device; with graphs at most {MOST_CALLS}
    are wanted. "graphs" is how many of these launch a graph.

DDP is made of the recording of the module alone: a process and a host for each device, and for each bucket of 25 MiB an
all-reduce as soon as its gradients are there. It takes the latency of a copy and the time of 2 (N - 1) / N of its bytes
over one link, and the gradients lie in the buckets. Buffers are not sent, and no process waits for a slower one: this
is the best that DDP can do. FSDP2 is made of it too, with a unit for each block, and one for the rest, which stays
gathered from forward to backward: copies into and out of what is sent, an all-gather one unit ahead and a
reduce-scatter at NCCL's published bandwidth, and an optimizer of an eighth. torch.nn.DataParallel is torch's pipeline
with plain copies, which it has without NCCL."""


def misses(row: Row) -> list[str]:
    """The bars that a way of the library misses. Only ways with graphs have bars."""
    if not has_bars(row):
        return []
    of_free_host = row["step"] / row["free_host"]
    found = [f"{of_free_host:.2f} times a free host"] if of_free_host > MOST_OF_FREE_HOST else []
    return [*found, *([f"{row['calls']:.0f} calls"] if row["calls"] > MOST_CALLS else [])]


def has_bars(row: Row) -> bool:
    return bool(row["graphs"] and row["devices"] > 1 and row["way"] != ALL_REDUCED)


TABLE = {
    "model": "{model}",
    "work": "{work}",
    "machine": "{machine}",
    "way": "{way}",
    "graphs": "{graphs}",
    "devices": "{devices}",
    "step,\nms": "{step:.2f}",
    "free host,\nms": "{free_host:.2f}",
    "step/\nfree host": lambda row: f"{row['step'] / row['free_host']:.2f}",
    "Python,\nms": "{python:.2f}",
    "calls": "{calls:.0f}",
    "graphs\n": "{graph_calls:.0f}",
    "misses": lambda row: "; ".join(misses(row)),
}


def judged(rows: Sequence[Row]) -> list[str]:
    """A sentence that says which bars are missed."""
    barred = [row for row in rows if has_bars(row)]
    missed = [f"{row['way']}, {row['model']}, {row['work']}: {', '.join(misses(row))}" for row in barred if misses(row)]
    if not barred:
        return []
    reached = f"{len(barred) - len(missed)} of {len(barred)} rows with graphs reach both bars."
    return [reached + (f" The others: {'; '.join(missed)}." if missed else "")]


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("graph_timelines", CAPTION, TABLE))
    return reports[-1]


@pytest.mark.parametrize(("shape", "work"), TASKS, ids=[f"{shape.name}, {work}" for shape, work in TASKS])
def test_with_and_without_a_host(shape: RealShape, work: str, report: Report, short: bool) -> None:
    if not cuda.is_stand_in() or torch.cuda.device_count() < DEVICES:
        pytest.skip(f"needs a stand-in for CUDA with {DEVICES} devices")
    if short and (shape, work) != (GPT_256, INFERENCE):
        pytest.skip("short")
    devices = [torch.device("cuda", index) for index in range(SHORT_DEVICES if short else DEVICES)]
    rows = predicted(shape, work, devices)
    plain = {row["way"]: row["calls"] for row in rows if not row["graphs"]}
    for row in rows:
        assert row["free_host"] <= row["step"] * (1 + 1e-9)
        assert (row["graph_calls"] > 0) == row["graphs"]
        assert not row["graphs"] or row["calls"] < plain[row["way"]]
    report.rows += rows
    report.notes[:] = judged(report.rows)


def a_step(begin: int) -> list[Launch]:
    """The host's copy, forward, two launches of a backward, and the optimizer, which waits for nothing."""
    return [
        launch(begin, copy=(HOST, 0)),
        launch(begin + 1),
        launch(begin + 2, thread=1, in_backward=True, issued_after=(begin + 1,)),
        launch(begin + 3, thread=1, in_backward=True),
        launch(begin + 4, issued_after=(begin + 3,)),
    ]


@pytest.fixture
def two_steps() -> Recorded:
    streams = (StreamName(0, 0),)
    return Recorded(Recording(streams, tuple(a_step(0))), Recording(streams, (*a_step(0), *a_step(5))))


def test_a_step_becomes_one_call(two_steps: Recorded) -> None:
    made = changed(two_steps, one_graph)
    assert [one.graph for one in made.two.launches] == [None, 1, 1, 1, 1, None, 6, 6, 6, 6]
    assert {one.thread for one in made.two.launches} == {0}
    assert (made.one.calls, made.two.calls) == (2, 4)
    assert sum(one.host_seconds for one in made.one.launches) == pytest.approx(0.002)


def test_an_all_reduce_comes_after_its_gradients_and_before_the_optimizer(two_steps: Recorded) -> None:
    arrivals = [Arrival(3, 2**20), Arrival(4, 100)]
    made = changed(two_steps, lambda launches: ddp(launches, arrivals, 8, 1), streams=1)
    for begin in (0, 7):
        own = made.two.launches[begin : begin + 7]
        assert [one.op for one in own].count("all-reduce") == 2
        first, second = own[3], own[5]
        assert (first.waits, second.waits, own[6].waits) == ((begin + 2,), (begin + 4,), (begin + 5,))
        assert (first.bytes_written, second.bytes_written) == (2**20 * 7 // 4, 175)
        assert first.stream == 1
    assert [one.index for one in made.two.launches] == [*range(14)]


def test_a_unit_is_gathered_one_ahead_and_its_sum_does_not_hold_up_the_backward(two_steps: Recorded) -> None:
    units = [Unit(800, 1, None, 4), Unit(1600, 1, 2, 3)]  # the root, and a block that is gathered again
    made = changed(two_steps, lambda launches: fsdp2(launches, units, 8, 1, 1.0, 2.0), streams=2)
    shown = [(one.op, one.stream, one.bytes_written, one.waits) for one in made.two.launches[1:18]]
    assert shown == [
        ("copy-in", 1, 100, (0,)),
        ("all-gather", 1, 700, ()),
        ("copy-out", 0, 800, (2,)),
        ("copy-in", 1, 200, (0,)),
        ("all-gather", 1, 1400, ()),
        ("copy-out", 0, 1600, (5,)),
        ("aten::add", 0, 0, ()),
        ("copy-in", 1, 200, (6,)),
        ("all-gather", 1, 1400, ()),
        ("copy-out", 0, 1600, (9,)),
        ("aten::add", 0, 0, ()),
        ("copy-in", 0, 1600, ()),
        ("reduce-scatter", 2, 2800, (12,)),
        ("aten::add", 0, 0, ()),
        ("copy-in", 0, 800, ()),
        ("reduce-scatter", 2, 1400, (15,)),
        ("aten::add", 0, 0, (16,)),
    ]
    assert [one.thread for one in made.two.launches[:18]] == [0] * 8 + [1] * 9 + [0]
    assert made.two.launches[8].issued_after == (7,)
    assert [one.index for one in made.two.launches] == [*range(36)]


def test_buckets_are_those_of_ddp() -> None:
    megabytes = [Arrival(number, 10 * 2**20) for number in range(6)]
    assert [(bucket.launches, bucket.nbytes >> 20) for bucket in buckets_of(megabytes)] == [(0, 10), (3, 30), (5, 20)]
