"""What captured graphs would bring on 8 x A100: predictions, by timelines of a stand-in for CUDA. They are not judged.

``python -m nogpu.cuda -m pytest bench/test_graph_timelines.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graph_timelines import GPT_256, TASKS, predicted
from graph_timelines_report import ALL_REDUCED, CAPTION, INFERENCE, TRAINING, PredictedStep, judged
from nogpu import cuda
from nogpu.timeline import HOST, Launch, Recording, StreamName
from process_timelines import Arrival, buckets_of, changed, ddp, one_graph
from real_shapes import RealShape
from reporting import Report, table
from timelines import ALONE, REPLICATE, WRAPPER, Recorded

DEVICES, SHORT_DEVICES = 8, 2


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("graph_timelines", CAPTION))
    return reports[-1]


@pytest.mark.parametrize(("shape", "work"), TASKS, ids=[f"{shape.name}, {work}" for shape, work in TASKS])
def test_with_and_without_a_host(shape: RealShape, work: str, report: Report, short: bool) -> None:
    if not cuda.is_stand_in() or torch.cuda.device_count() < DEVICES:
        pytest.skip(f"needs a stand-in for CUDA with {DEVICES} devices")
    if short and (shape, work) != (GPT_256, INFERENCE):
        pytest.skip("short")
    devices = [torch.device("cuda", index) for index in range(SHORT_DEVICES if short else DEVICES)]
    rows = predicted(shape, work, devices)
    for row in rows:
        assert row.free_host <= row.step * (1 + 1e-9)
        assert (row.graph_calls > 0) == row.graphs
    plain = {row.way: row for row in rows if not row.graphs}
    for row in rows:
        if row.graphs:
            assert row.calls < plain[row.way].calls
    report.rows += rows
    report.notes[:] = judged([row for row in report.rows if isinstance(row, PredictedStep)])


def kernel(index: int, **fields: object) -> Launch:
    blank = Launch(index, "aten::mm", 0, False, 0, 0, 0, 0, "float32", (), None, (), None, (), (), 1.0)
    return replace(blank, **fields)  # type: ignore[arg-type]


def a_step(begin: int) -> list[Launch]:
    """The host's copy, forward, two launches of a backward, and the optimizer, which waits for nothing."""
    return [
        kernel(begin, copy=(HOST, 0)),
        kernel(begin + 1),
        kernel(begin + 2, thread=1, in_backward=True, issued_after=(begin + 1,)),
        kernel(begin + 3, thread=1, in_backward=True),
        kernel(begin + 4, issued_after=(begin + 3,)),
    ]


@pytest.fixture
def two_steps() -> Recorded:
    streams = (StreamName(0, 0),)
    return Recorded(Recording(streams, tuple(a_step(0))), Recording(streams, (*a_step(0), *a_step(5))))


def test_a_step_becomes_one_call(two_steps: Recorded) -> None:
    made = changed(two_steps, one_graph)
    assert [launch.graph for launch in made.two.launches] == [None, 1, 1, 1, 1, None, 6, 6, 6, 6]
    assert {launch.thread for launch in made.two.launches} == {0}
    assert (made.one.calls, made.two.calls) == (2, 4)
    assert sum(launch.host_seconds for launch in made.one.launches) == 2


def test_an_all_reduce_comes_after_its_gradients_and_before_the_optimizer(two_steps: Recorded) -> None:
    arrivals = [Arrival(3, 2**20), Arrival(4, 100)]
    made = changed(two_steps, lambda launches: ddp(launches, arrivals, 8, 1), streams=1)
    for begin in (0, 7):
        own = made.two.launches[begin : begin + 7]
        assert [launch.op for launch in own].count("all-reduce") == 2
        first, second = own[3], own[5]
        assert (first.waits, second.waits, own[6].waits) == ((begin + 2,), (begin + 4,), (begin + 5,))
        assert (first.bytes_written, second.bytes_written) == (2**20 * 7 // 4, 175)
        assert first.stream == 1
    assert [launch.index for launch in made.two.launches] == [*range(14)]


def test_buckets_are_those_of_ddp() -> None:
    megabytes = [Arrival(number, 10 * 2**20) for number in range(6)]
    assert [(bucket.launches, bucket.nbytes >> 20) for bucket in buckets_of(megabytes)] == [(0, 10), (3, 30), (5, 20)]


def test_the_small_gpt_has_its_parameters() -> None:
    assert sum(p.numel() for p in GPT_256.model(torch.device("meta")).parameters()) == GPT_256.parameters


def test_bars_are_for_ways_of_the_library_with_graphs() -> None:
    row = PredictedStep("net", TRAINING, WRAPPER, True, 8, "8 x A100", 1.2, 1.0, 3.0, 900, 61.0, 20.0)
    assert row.misses == ["1.20 times a free host", "61 calls"]
    others = [replace(row, graphs=False), replace(row, way=ALONE, devices=1), replace(row, way=ALL_REDUCED)]
    assert not any(other.misses for other in others)
    good = replace(row, way=REPLICATE, step=1.1, calls=60.0)
    (sentence,) = judged([row, *others, good])
    assert sentence == (
        "1 of 2 rows with graphs reach both bars. The others: "
        "DataParallel, net, training: 1.20 times a free host, 61 calls."
    )
    assert "61" in table([row.cells(), good.cells()])
