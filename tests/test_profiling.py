"""Ranges that a profiler sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler

from dataparallel import DataParallel, _torch
from dataparallel.profiling import stage

STAGES = ["scatter", "replicate", "parallel_apply", "gather"]


def events(all_threads: bool, step: Any) -> list[Any]:
    options = {"experimental_config": _ExperimentalConfig(profile_all_threads=True)} if all_threads else {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        step()
    return list(profile.events())


def ours(found: list[Any]) -> list[str]:
    """The library's ranges in the order of their beginning."""
    found = sorted(found, key=lambda event: event.time_range.start)
    return [event.name.removeprefix("dataparallel::") for event in found if event.name.startswith("dataparallel::")]


def step_of(slots: list, **options: Any) -> Any:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).to(slots[0])
    model, x = DataParallel(module, slots, **options), torch.ones(6, 4, device=slots[0])
    model(x)

    def step() -> None:
        model(x).sum().backward()

    return step


def test_the_callers_thread_shows_the_stages_and_serial_replicas(slots: list) -> None:
    for serial in (False, True):
        found = ours(events(False, step_of(slots, serial=serial)))
        assert [name for name in found if name in STAGES] == STAGES
    assert [name for name in found if name.startswith("replica ")] == ["replica 0", "replica 1", "replica 2"]


def test_all_threads_show_the_replicas_and_their_operators(slots: list) -> None:
    found = events(True, step_of(slots, workers=3))
    names = ours(found)
    assert [name for name in names if name in STAGES] == STAGES
    replicas = [event for event in found if event.name.startswith("dataparallel::replica ")]
    assert sorted(event.name for event in replicas) == [f"dataparallel::replica {slot}" for slot in range(3)]
    (whole,) = (event for event in found if event.name == "dataparallel::parallel_apply")
    for replica in replicas:
        assert replica.thread != whole.thread
        assert whole.time_range.start <= replica.time_range.start
        assert replica.time_range.end <= whole.time_range.end
        inside = [event.name for event in found if event.thread == replica.thread and _within(event, replica)]
        assert "aten::linear" in inside
        assert "aten::tanh" in inside


def _within(event: Any, range_: Any) -> bool:
    return range_.time_range.start <= event.time_range.start and event.time_range.end <= range_.time_range.end


@pytest.mark.parametrize("serial", [False, True], ids=["workers", "serial"])
def test_a_range_ends_where_its_stage_fails(serial: bool, slots: list) -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("as asked")

    def step() -> None:
        with pytest.raises(ValueError, match="as asked"):
            DataParallel(Failing(), slots, serial=serial)(torch.ones(6, 4, device=slots[0]))
        with stage("after"):
            pass

    found = {event.name: event for event in events(True, step) if event.name.startswith("dataparallel::")}
    after = found["dataparallel::after"].time_range.start
    for name in ("parallel_apply", "replica 0"):
        assert found[f"dataparallel::{name}"].time_range.end <= after


def test_without_a_profiler_nothing_is_made(slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(slots)
    made: list[str] = []

    class Noting(profiler.record_function):
        def __init__(self, name: str, args: str | None = None) -> None:
            made.append(name)
            super().__init__(name, args)

    monkeypatch.setattr(profiler, "record_function", Noting)
    step()
    assert made == []
    assert stage("scatter") is stage("gather")
    events(False, step)
    assert "dataparallel::scatter" in made


@pytest.mark.devices("cuda")
def test_ranges_are_those_of_nvtx(slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(slots)
    with profiler.emit_nvtx():
        assert _torch.is_profiler_enabled()
        step()
