"""Which stream waits for which, on fakes: what orders streams of several devices cannot be seen on the CPU."""

from unittest import mock

import pytest
import torch

from dataparallel import functions
from dataparallel.thread_state import TRANSLATED

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class FakeStream:
    def __init__(self) -> None:
        self.waited_for: list[object] = []

    def wait_stream(self, stream: object) -> None:
        self.waited_for.append(stream)


def test_sums_wait_for_the_streams_that_gradients_were_made_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made_on, here = FakeStream(), FakeStream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: made_on if device == FIRST else here)
    grads = [mock.Mock(device=FIRST, is_sparse=False), None, mock.Mock(device=SECOND, is_sparse=False)]
    functions._wait_for_streams({FIRST: made_on, SECOND: made_on}, grads)
    assert here.waited_for == [made_on]
    grads[2].record_stream.assert_called_once_with(here)
    assert made_on.waited_for == []
    grads[0].record_stream.assert_not_called()


def test_a_replica_runs_on_the_callers_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = {FIRST: "default 0", SECOND: "default 1"}
    selected: list[object] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current[device])
    monkeypatch.setattr(torch.accelerator, "set_stream", selected.append)
    (row,) = (setting for setting in TRANSLATED if setting.name == "current stream")
    current[SECOND] = "the caller's"
    value = row.read([FIRST, SECOND])
    current[SECOND] = "default 1"  # as a worker sees it
    end = row.hold(value, [FIRST, SECOND], SECOND)
    assert selected == ["the caller's"]
    assert end is not None
    end()
    assert selected == ["the caller's", "default 1"]
