"""A trace of real steps: every form, both kinds of devices, threads, errors; and what it leaves behind."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
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
from dataparallel.tracing.results import REST
from each_form import Form, by_wrapper, replicated, sharded_whole

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

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
    """Takes a while without Python's lock."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEPT)
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


@pytest.mark.parametrize("form", [by_wrapper, serial, replicated, sharded_whole])
def test_every_form_has_its_stages_and_they_add_up(form: Form, slots: list, root: torch.device) -> None:
    step = steps_of(form(Net().to(root), slots), torch.ones(6, 8, device=root))
    step()
    begin = time.perf_counter()
    with dataparallel.trace() as trace:
        for _ in range(3):
            step()
    wall = time.perf_counter() - begin
    found = trace.results
    stages = {stage.name: stage for stage in found.stages}
    expected = {"scatter", "replicate", "forward", "gather", "backward", "sums", "optimizer", REST}
    assert {*stages} == expected | ({"unshard"} if form is sharded_whole else set())
    assert all(
        stages[name].calls == 3 for name in ("scatter", "replicate", "forward", "gather", "backward", "optimizer")
    )
    assert found.seconds <= wall
    assert sum(stage.seconds for stage in found.stages) == pytest.approx(found.seconds, rel=1e-6)
    assert found.steps == 3
    assert found.modules == {"Net": 3}
    assert found.forms == [{replicated: "replicate", sharded_whole: "fully_shard"}.get(form, "DataParallel")]
    assert [slot.calls for slot in found.slots] == [3, 3, 3]
    assert [str(slot.device) for slot in found.slots] == [str(torch.device(slot)) for slot in slots]
    if root.type == "cpu":
        assert found.memory == []
        assert all(slot.device_forward is None for slot in found.slots)
        assert found.sent == []
    else:
        assert [memory.device for memory in found.memory] == [*dict.fromkeys(map(torch.device, slots))]
        assert all(memory.peak >= max(memory.before, memory.after, 1) for memory in found.memory)
        assert all(slot.device_forward is not None and slot.device_backward is not None for slot in found.slots)
        assert {sent.stage for sent in found.sent} >= {"scatter", "gather", "backward", "sums"}
    assert trace.table().splitlines()[-1] == trace.advice


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
    optimizer, x = Slower(model.parameters(), lr=0.1), torch.ones(6, 8, device=root)
    model(x).sum().backward()
    with dataparallel.trace() as trace:
        loss = SlowBackward.apply(model(x)).sum()
        loss.backward()
        optimizer.step()
        time.sleep(4 * SLEPT)
    found = trace.results
    for name, slept in (("forward", 3), ("backward", 2), ("optimizer", 3), (REST, 4)):
        assert found.stage(name).seconds >= slept * SLEPT
    assert sum(stage.seconds for stage in found.stages) == pytest.approx(found.seconds, rel=0.05)
    forward = found.stage("forward")
    assert forward.running is not None
    assert forward.running <= forward.seconds - 3 * SLEPT  # it slept
    assert all(slot.no_permit >= slot.slot * SLEPT for slot in found.slots)  # for those before it


def test_a_slow_slot_is_named(slots: list, root: torch.device) -> None:
    class SlowWithMany(Net):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(SLEPT * len(x))
            return super().forward(x)

    model = DataParallel(SlowWithMany().to(root), slots, chunk_sizes=[1, 1, 5], serial=True)
    x = torch.ones(7, 8, device=root)
    model(x)
    with dataparallel.trace() as trace:
        model(x)
    found = trace.results
    assert found.imbalance > 1.5
    assert max(found.slots, key=lambda slot: slot.work).slot == 2


def test_several_wrappers_in_several_threads(slots: list, root: torch.device) -> None:
    models = [DataParallel(Net().to(root), slots), replicate(Slow().to(root), devices=slots)]
    x = torch.ones(6, 8, device=root)

    def train(model: nn.Module) -> None:
        for _ in range(3):
            model(x).square().mean().backward()

    for model in models:
        train(model)
    with dataparallel.trace() as trace:
        thread = threading.Thread(target=train, args=models[1:], name="another")
        thread.start()
        train(models[0])
        thread.join()
    found = trace.results
    assert found.modules == {"Net": 3, "Slow": 3}
    assert {*found.forms} == {"DataParallel", "replicate"}
    assert found.stage("forward").calls == 3
    assert found.stage("backward").calls == 3
    assert found.stage("forward").elsewhere >= 3 * SLEPT
    assert [slot.calls for slot in found.slots] == [6, 6, 6]
    assert sum(stage.seconds for stage in found.stages) == pytest.approx(found.seconds, rel=1e-6)


def test_a_step_is_the_same_step(slots: list, root: torch.device) -> None:
    """To the bit."""
    torch.manual_seed(0)
    net = Net().to(root)
    x = torch.randn(6, 8, device=root)
    traced, plain = copy.deepcopy(net), net
    for each in (traced, plain):
        step = steps_of(DataParallel(each, slots, workers=1), x)
        step()
        if each is traced:
            with dataparallel.trace():
                step()
        else:
            step()
    for one, other in zip(traced.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_error_in_the_block_ends_the_trace(slots: list, root: torch.device) -> None:
    model, x = DataParallel(Net().to(root), slots), torch.ones(6, 8, device=root)
    trace = dataparallel.trace()

    def block() -> None:
        with trace:
            model(x)
            raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        block()
    assert profiling.recorder is None
    assert trace.results.modules == {"Net": 1}
    with dataparallel.trace() as another:
        model(x)
    assert another.results.modules == {"Net": 1}


def test_two_traces_at_once_are_refused_and_the_first_goes_on(slots: list, root: torch.device) -> None:
    model, x = DataParallel(Net().to(root), slots), torch.ones(6, 8, device=root)
    backward = torch.autograd.backward
    with dataparallel.trace() as trace:
        inside = torch.autograd.backward
        with pytest.raises(RuntimeError, match="a trace runs in this process already"), dataparallel.trace():
            raise AssertionError("the block must not begin")
        assert torch.autograd.backward is inside
        model(x).sum().backward()
    assert torch.autograd.backward is backward
    assert trace.results.stage("backward").calls == 1


def test_a_trace_is_for_one_block() -> None:
    trace = dataparallel.trace()
    for ask in (
        str,
        Trace.table,
        lambda t: t.results,
        lambda t: t.advice,
        lambda t: t.plot("x"),
        lambda t: t.save("x"),
    ):
        with pytest.raises(RuntimeError, match="no results yet"):
            ask(trace)
    with trace, pytest.raises(RuntimeError, match="no results yet"):
        str(trace)
    with pytest.raises(RuntimeError, match="records one block"), trace:
        pass
    assert profiling.recorder is None
    assert "No stage of this library ran" in str(trace)


def test_a_failure_at_the_beginning_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise MemoryError("as asked")

    backward = torch.autograd.backward
    monkeypatch.setattr("dataparallel.tracing.block.MemoryBefore", fails)
    with pytest.raises(MemoryError), dataparallel.trace():
        pass
    assert profiling.recorder is None
    assert torch.autograd.backward is backward


def test_one_slot_and_no_slot(root: torch.device) -> None:
    model, x = DataParallel(Slow().to(root), [root]), torch.ones(6, 8, device=root)
    with dataparallel.trace() as trace:
        model(x)
    assert trace.results.stage("forward").seconds >= SLEPT
    assert trace.results.slots == []
    assert "one slot needs none" in str(trace)


def test_picture_and_file(slots: list, root: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    step = steps_of(DataParallel(Net().to(root), slots), torch.ones(6, 8, device=root))
    with dataparallel.trace() as trace:
        step()
    trace.plot(tmp_path / "step.png")
    trace.save(tmp_path / "step.json")
    assert (tmp_path / "step.png").stat().st_size > 1000
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    titles = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert titles[:5] == [
        "caller (MainThread)",
        *(f"slot {i} ({torch.device(s)})" for i, s in enumerate(slots)),
        "sums",
    ]
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last <= 1e6 * trace.results.seconds


def test_a_profile_shows_its_ranges_inside_of_a_trace(slots: list, root: torch.device) -> None:
    model, x = DataParallel(Net().to(root), slots, serial=True), torch.ones(6, 8, device=root)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, dataparallel.trace():
        model(x)
    names = {event.name for event in profile.events()}
    assert {"dataparallel::scatter", "dataparallel::parallel_apply", "dataparallel::replica 2"} <= names


@pytest.mark.long
@pytest.mark.devices("cpu")
def test_matplotlib_is_loaded_by_plot_alone() -> None:
    code = (
        "import sys, dataparallel\n"
        "with dataparallel.trace() as trace: pass\n"
        "str(trace)\n"
        "assert not any(name.startswith('matplotlib') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
