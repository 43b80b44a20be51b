"""What a trace promises: every form, all threads, each kind of devices; errors pass; it changes nothing."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import DataParallel, profiling
from dataparallel.composable import replicate
from dataparallel.tracing import Trace
from dataparallel.tracing.rows import REST, Row
from each_form import Form, by_wrapper, replicated, sharded_whole
from processes import run_script

SLEPT = 0.02


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Slow(Net):
    """Takes a while for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEPT * len(x))
        return super().forward(x)


def serial(net: nn.Module, slots: list) -> nn.Module:
    return DataParallel(net, slots, serial=True)


def steps_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def row(trace: Trace, stage: str, replica: int | None = None) -> Row:
    (found,) = (row for row in trace.rows if (row.stage, row.replica) == (stage, replica))
    return found


@pytest.mark.parametrize("form", [by_wrapper, serial, replicated, sharded_whole])
def test_every_form_has_a_row_for_each_stage_and_each_replica(form: Form, slots: list, root: torch.device) -> None:
    step = steps_of(form(Net().to(root), slots), torch.ones(6, 8, device=root))
    step()
    begin = time.perf_counter()
    with dataparallel.trace() as trace:
        for _ in range(3):
            step()
    wall = time.perf_counter() - begin
    stages = ["scatter", "replicate", "forward", "gather", "backward", "sums", "optimizer", REST]
    assert {row.stage for row in trace.rows} == {*stages} | ({"unshard"} if form is sharded_whole else set())
    for stage in ("scatter", "replicate", "forward", "gather", "optimizer"):
        assert row(trace, stage).calls == 3
    replicas = [row(trace, "forward", slot) for slot in range(3)]
    assert [(row.calls, row.on) for row in replicas] == [(3, torch.device(slot)) for slot in slots]
    assert all(0 < row.host < trace.seconds < wall for row in replicas)
    if root.type == "cpu":
        assert all(row.device is None for row in trace.rows)
    else:
        assert ("CUDA" in {each.name for each in trace.profile.activities}) == (root.type == "cuda")  # kernels, if any
        assert all(row.device is not None and row.device > 0 for row in replicas)
        if len({*slots}) == len(slots):  # a thread of the engine works for one device
            assert all(row(trace, "backward", slot).host > 0 for slot in range(3))


def test_times_are_those_of_a_stopwatch(slots: list, root: torch.device) -> None:
    """Each part sleeps for a known time, so that none can be counted in another's place."""

    class Slower(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            time.sleep(3 * SLEPT)

    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
            time.sleep(2 * SLEPT)
            return grad

    model = DataParallel(Slow().to(root), slots, serial=True)
    optimizer, x = Slower(model.parameters(), lr=0.1), torch.ones(3, 8, device=root)
    model(x).sum().backward()
    with dataparallel.trace() as trace:
        loss = SlowBackward.apply(model(x)).sum()
        loss.backward()
        optimizer.step()
        time.sleep(4 * SLEPT)
    slept = {"forward": 3, "backward": 2, "optimizer": 3, REST: 4}
    for stage, times in slept.items():
        assert times * SLEPT <= row(trace, stage).host <= trace.seconds - (12 - times) * SLEPT
    for slot in range(3):
        replica = row(trace, "forward", slot)
        assert replica.host >= SLEPT
        assert replica.waiting is not None
        assert replica.waiting >= slot * SLEPT  # for those before it


def test_a_slow_slot_is_named(slots: list, root: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = DataParallel(Slow().to(root), slots, chunk_sizes=[1, 1, 5], serial=True), torch.ones(7, 8, device=root)
    model(x)
    with dataparallel.trace() as trace:
        model(x)
    assert any("replica 2 is slow" in sentence for sentence in trace.advice)
    assert capsys.readouterr().out == f"{trace}\n"
    assert f"\n           2 on {slots[2]}" in str(trace)


def test_the_host_waits_at_the_end_for_the_devices_that_have_run(
    slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long is in the last row. After an error it does not wait: a device may have failed."""
    model, x = DataParallel(Net().to(root), slots[:2]), torch.ones(6, 8, device=root)
    model(x)
    waited: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        waited.append(device)
        time.sleep(SLEPT)

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    with pytest.raises(ValueError, match="as asked"), dataparallel.trace():
        raise ValueError("as asked", model(x))
    assert waited == []
    with dataparallel.trace() as trace:
        model(x)
    assert {*waited} == {*map(torch.device, slots[:2])} - {torch.device("cpu")}
    assert (trace.behind >= SLEPT) == bool(waited)


def test_calls_of_all_threads_are_in_it(slots: list, root: torch.device) -> None:
    """And the backward passes that these threads run."""
    models = [DataParallel(Net().to(root), slots), replicate(Slow().to(root), devices=slots)]
    x = torch.ones(6, 8, device=root)

    def train(model: nn.Module) -> None:
        for _ in range(3):
            model(x).square().mean().backward()

    for model in models:
        train(model)
    with dataparallel.trace() as trace:
        thread = threading.Thread(target=train, args=models[1:])
        thread.start()
        train(models[0])
        thread.join()
    assert row(trace, "forward").calls == 6
    assert row(trace, "forward", 2).calls == 6
    assert row(trace, "forward").host >= 3 * SLEPT
    nodes = [event for event in trace.profile.events() if "evaluate_function: GatherBackward" in event.name]
    assert len(nodes) == 6


def test_a_step_is_the_same_step(form: Form, slots: list, root: torch.device) -> None:
    """To the bit."""
    torch.manual_seed(0)
    net = Net().to(root)
    x = torch.randn(6, 8, device=root)
    traced, plain = form(copy.deepcopy(net), slots), form(net, slots)
    with dataparallel.trace():
        steps_of(traced, x)()
    steps_of(plain, x)()
    with torch.no_grad():
        assert torch.equal(traced(x), plain(x))


def test_the_file_shows_every_replica(slots: list, root: torch.device, tmp_path: Path) -> None:
    step = steps_of(DataParallel(Net().to(root), slots, workers=3), torch.ones(6, 8, device=root))
    step()
    with dataparallel.trace(tmp_path / "step.json"):
        step()
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    on_host = [event for event in events if event.get("cat") != "gpu_user_annotation"]  # the same names, for streams
    ours = {event["name"]: event["tid"] for event in on_host if event.get("name", "").startswith("dataparallel::")}
    assert {f"dataparallel::{stage}" for stage in ("scatter", "replicate", "parallel_apply", "gather")} <= {*ours}
    assert all(ours[f"dataparallel::replica {slot}"] != ours["dataparallel::gather"] for slot in range(3))
    assert any(event.get("name") == "aten::tanh" for event in events)


def test_a_folder_that_is_missing_is_told_before_the_block(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"trace\('.*step.json'\): there is no folder '.*nowhere'; make it"):
        dataparallel.trace(tmp_path / "nowhere" / "step.json")


def test_an_error_passes_and_what_was_seen_is_printed(
    slots: list, root: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = DataParallel(Net().to(root), slots), torch.ones(6, 8, device=root)
    error, trace = ValueError("as asked"), dataparallel.trace()

    def block() -> None:
        with trace:
            model(x)
            raise error

    with pytest.raises(ValueError, match="as asked") as caught:
        block()
    assert caught.value is error
    assert "\nforward " in capsys.readouterr().out
    assert row(trace, "forward").calls == 1


def test_a_trace_that_fails_with_its_block_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise MemoryError("no table")

    monkeypatch.setattr("dataparallel.tracing.block.rows_of", fails)
    with (
        pytest.warns(UserWarning, match="its trace is lost: MemoryError: no table"),
        pytest.raises(ValueError, match="as asked"),
        dataparallel.trace(),
    ):
        raise ValueError("as asked")


def test_two_at_a_time_are_refused_and_the_first_goes_on(slots: list, root: torch.device) -> None:
    model, x = DataParallel(Net().to(root), slots), torch.ones(6, 8, device=root)
    with dataparallel.trace() as trace:
        with pytest.raises(RuntimeError, match="end its block before another one begins"), dataparallel.trace():
            raise AssertionError("the block must not begin")
        model(x)
    assert row(trace, "forward").calls == 1


def test_so_is_a_trace_beside_a_profile_of_torch() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(RuntimeError, match=r"a profiler of torch runs already, .* end it before the trace begins"),
        dataparallel.trace(),
    ):
        raise AssertionError("the block must not begin")
    with dataparallel.trace():
        pass


def test_a_profile_of_torch_inside_of_a_trace_is_told_at_its_end() -> None:
    """torch lets it end the one that runs."""
    with (
        pytest.raises(RuntimeError, match="let only one of the two run"),
        dataparallel.trace(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ):
        torch.ones(1)
    with dataparallel.trace():
        pass


def test_a_trace_is_for_one_block() -> None:
    trace = dataparallel.trace()
    with pytest.raises(AttributeError):
        trace.rows  # noqa: B018
    with trace:
        assert "has not ended" in str(trace)
    with pytest.raises(RuntimeError, match="a trace is for one block"), trace:
        pass
    assert profiling.around_replica is None
    (sentence,) = trace.advice
    assert "no stage ran in the block" in sentence


def test_one_slot(root: torch.device) -> None:
    model, x = DataParallel(Slow().to(root), [root]), torch.ones(2, 8, device=root)
    with dataparallel.trace() as trace:
        model(x)
    assert row(trace, "forward").host >= 2 * SLEPT
    assert [each for each in trace.rows if each.replica is not None] == []


UNTOUCHED = """
import os
import torch
import dataparallel
with dataparallel.trace() as trace:
    assert not torch.cuda.is_initialized()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    assert torch.cuda.device_count() <= 1
assert [each.name for each in trace.profile.activities] == ["CPU"]  # to ask for kernels would touch devices
print("untouched")
"""


@pytest.mark.long
@pytest.mark.devices("cpu", "cuda")
def test_no_device_is_touched_before_the_program_does() -> None:
    assert run_script(UNTOUCHED).splitlines()[-1] == "untouched"
