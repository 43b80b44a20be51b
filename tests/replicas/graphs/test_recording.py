"""Graphs that are captured one after the other, and the pool that they share."""

from __future__ import annotations

import pytest
import torch

from dataparallel.replicas.graphs.pools import CapturedGraphs, Pool
from spare_streams import spare_stream

pytestmark = pytest.mark.devices("cuda")


@pytest.fixture(autouse=True)
def on_a_stream(root: torch.device) -> object:
    with torch.cuda.device(root), torch.cuda.stream(spare_stream(root)):
        yield


def test_what_runs_after_a_cut_is_in_another_graph(root: torch.device) -> None:
    recording, x = CapturedGraphs(Pool()), torch.ones(3, device=root)
    with recording.runs():
        y = x + 1
        recording.cut()
        z = y * 2
    assert len(recording.graphs) == 2
    x.fill_(4)
    for graph in recording.graphs:
        graph.replay()
    assert z.tolist() == [10] * 3
    x.fill_(5)
    recording.graphs[1].replay()
    assert z.tolist() == [10] * 3


def test_an_error_ends_the_capture(root: torch.device) -> None:
    recording = CapturedGraphs(Pool())

    def fails() -> None:
        with recording.runs():
            recording.cut()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not torch.cuda.is_current_stream_capturing()
    torch.ones(3, device=root).sum().item()


def test_a_pool_can_be_used_again_when_all_its_graphs_are_gone(root: torch.device) -> None:
    pool, x = Pool(), torch.ones(3, device=root)
    for _ in range(3):
        recording = CapturedGraphs(pool)
        with recording.runs():
            y = x * 3
        recording.graphs[0].replay()
        assert y.tolist() == [3] * 3
        del recording, y


def test_graphs_share_a_pool_as_long_as_one_is_there(root: torch.device) -> None:
    pool, x = Pool(), torch.ones(3 << 20, device=root)
    recordings = []
    before = torch.cuda.memory_reserved(root)
    for _ in range(4):
        recordings.append(CapturedGraphs(pool))
        with recordings[-1].runs():
            x * 3  # its memory is free for the next one
    assert torch.cuda.memory_reserved(root) - before < 2 * x.nbytes
