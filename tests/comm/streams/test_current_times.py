"""Times on devices. Simulated ones have events with times, and compute in the thread that launches."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dataparallel.comm.streams import current
from dataparallel.comm.streams.current import DeviceClock, TimedEvent, current_streams


@pytest.mark.devices("sim", "cuda")
def test_the_seconds_between_marks_of_each_device(slots: list) -> None:
    clock, streams = DeviceClock(), current_streams(slots)
    before, begin = time.perf_counter(), clock.marks(streams)
    for device in streams:
        torch.ones(300, 300, device=device).mm(torch.ones(300, 300, device=device))
    end = clock.marks(streams)
    for device in streams:
        torch.accelerator.synchronize(device)
    whole = time.perf_counter() - before
    found = clock.seconds(begin, end)
    assert found.keys() == {*streams}
    assert all(0 < seconds <= whole for seconds in found.values())


@pytest.mark.devices("sim", "cuda")
def test_an_event_is_recorded_on_its_stream_and_leaves_the_current_device(slots: list) -> None:
    before = torch.accelerator.current_device_index()
    stream = torch.Stream(torch.device(slots[2]))
    event = TimedEvent(stream)
    event.synchronize()
    assert torch.accelerator.current_device_index() == before


def test_cpu_slots_have_no_marks() -> None:
    clock = DeviceClock()
    assert clock.marks(current_streams([torch.device("cpu")])) == {}
    assert clock.seconds({}, {}) == {}


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_a_backend_without_such_events_is_asked_once(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fails(stream: Any) -> Any:
        asked.append(stream)
        raise error("no timing events")

    monkeypatch.setattr(current, "TimedEvent", fails)
    clock, streams = DeviceClock(), {torch.device("meta"): object()}
    assert clock.marks(streams) == {}  # type: ignore[arg-type]
    assert clock.marks(streams) == {}  # type: ignore[arg-type]
    assert len(asked) == 1
