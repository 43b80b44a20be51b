"""Calls of torch are recorded inside a block, after which torch is as before; and what devices have in memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import dataparallel
from dataparallel import profiling
from dataparallel.tracing import block
from dataparallel.tracing.block import MemoryBefore, torch_calls_recorded
from dataparallel.tracing.recorder import Recorder, stop

pytestmark = pytest.mark.devices("cpu")  # most of them know no device

MIB = 2**20

BACKWARD, GRAD = torch.autograd.backward, torch.autograd.grad


@pytest.fixture(autouse=True)
def torch_is_as_before() -> Any:
    yield
    assert torch.autograd.backward is BACKWARD
    assert torch.autograd.grad is GRAD


def loss() -> torch.Tensor:
    return torch.ones(2, requires_grad=True).square().sum()


def names(recorder: Recorder) -> list[str]:
    return [span.name for span in recorder.spans]


def test_each_way_to_run_the_engine(recorder: Recorder) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch_calls_recorded(recorder):
        loss().backward()
        torch.autograd.backward(loss())
        (grad,) = torch.autograd.grad(x.square().sum(), [x])
    assert names(recorder) == ["backward"] * 3
    torch.testing.assert_close(grad, torch.full((2,), 2.0))
    loss().backward()
    assert len(recorder.spans) == 3


def test_the_steps_of_all_optimizers(recorder: Recorder) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    first, second = torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.AdamW(parameters[1:])
    first.step()
    with torch_calls_recorded(recorder):
        first.step()
        second.step()
        first.step()
    first.step()
    assert [(span.detail, span.call) for span in recorder.spans] == [("SGD", 0), ("AdamW", 1), ("SGD", 0)]


def test_a_closure_is_inside_of_its_step(recorder: Recorder) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        result = parameter.square().sum()
        result.backward()
        return result

    with torch_calls_recorded(recorder):
        optimizer.step(closure)
    backward, step = recorder.spans
    assert (backward.name, step.name) == ("backward", "optimizer")
    assert step.start <= backward.start <= backward.end <= step.end


def test_a_backward_that_fails_is_recorded(recorder: Recorder) -> None:
    with torch_calls_recorded(recorder), pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()
    assert names(recorder) == ["backward"]


def test_an_error_in_the_block_puts_torch_back(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="as asked"), torch_calls_recorded(recorder):
        raise ValueError("as asked")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    assert names(recorder) == []


def test_other_threads_are_recorded_as_themselves(recorder: Recorder) -> None:
    with torch_calls_recorded(recorder):
        thread = threading.Thread(target=lambda: loss().backward(), name="another")
        thread.start()
        thread.join()
    assert [span.thread.name for span in recorder.spans] == ["another"]


def test_a_function_that_somebody_has_kept_goes_on_to_torch(recorder: Recorder) -> None:
    with torch_calls_recorded(recorder):
        kept = torch.autograd.backward
    stop(recorder)
    kept(loss())
    assert names(recorder) == []


def test_what_others_have_put_there_stays(recorder: Recorder) -> None:
    """They have wrapped this room's function, and go when they like."""

    def others(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    with torch_calls_recorded(recorder):
        inner = torch.autograd.backward
        torch.autograd.backward = others
    try:
        assert torch.autograd.backward is others
        loss().backward()
    finally:
        torch.autograd.backward = BACKWARD


@pytest.mark.long
@pytest.mark.filterwarnings("error:.*trace.*:UserWarning")
def test_a_compiled_step_is_recorded_and_not_compiled_again(recorder: Recorder) -> None:
    """The clocks are read by ``ctypes``, which the compiler cannot trace: it must not try."""
    from torch._dynamo.utils import counters

    model, x = nn.Linear(4, 4), torch.ones(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    graphs = dict(counters["stats"])
    with torch_calls_recorded(recorder):
        for _ in range(2):
            step()
    step()
    assert names(recorder) == ["backward", "optimizer"] * 2
    assert dict(counters["stats"]) == graphs


def test_the_functions_look_like_torchs(recorder: Recorder) -> None:
    with torch_calls_recorded(recorder):
        assert torch.autograd.backward.__doc__ == BACKWARD.__doc__
        assert torch.autograd.grad.__name__ == "grad"


@pytest.mark.devices("sim", "cuda")
def test_bytes_of_each_device(slots: list) -> None:
    devices = [torch.device(slot) for slot in slots]
    kept = torch.empty(MIB, dtype=torch.uint8, device=devices[1])
    larger = torch.empty(9 * MIB, dtype=torch.uint8, device=devices[1])
    del larger  # a peak from before the block
    before = MemoryBefore()
    at_most = torch.empty(3 * MIB, dtype=torch.uint8, device=devices[1])
    del at_most
    stays = torch.empty(2 * MIB, dtype=torch.uint8, device=devices[1])
    found = before.until_now([devices[0], devices[1], devices[1]])
    assert [one.device for one in found] == devices[:2]
    assert [one.slots for one in found] == [(0,), (1, 2)]
    second = found[1]
    assert second.after - second.before == 2 * MIB
    assert second.peak - second.before == 3 * MIB
    assert second.before >= MIB
    assert found[0].before == found[0].after == found[0].peak
    del kept, stays


def test_there_is_no_figure_for_cpu_slots() -> None:
    assert MemoryBefore().until_now([torch.device("cpu")] * 2) == []


def test_devices_that_nobody_has_used_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their counters are 0, and what looks at them first decides which of them the process sees."""

    def fails() -> Any:
        raise AssertionError("devices were looked at")

    device = torch.device("meta", 0)
    monkeypatch.setattr(block, "are_initialized", lambda: False)
    monkeypatch.setattr(block, "all_devices", fails)
    before = MemoryBefore()
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 3)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 5)
    (found,) = before.until_now([torch.device("cpu"), device])
    assert (found.slots, found.before, found.after, found.peak) == ((1,), 0, 3, 5)


def test_a_backend_that_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: Any) -> Any:
        raise RuntimeError("no allocator that counts")

    device = torch.device("meta", 0)
    monkeypatch.setattr(block, "are_initialized", lambda: True)
    monkeypatch.setattr(block, "all_devices", lambda: [device])
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", fails)
    assert MemoryBefore().until_now([device]) == []


def test_ranges_that_other_threads_end_after_the_block_are_in_no_result() -> None:
    inside, ended, before = threading.Event(), threading.Event(), threading.active_count()

    def works() -> None:
        with profiling.stage("replica", "Net", 0):
            inside.set()
            ended.wait()

    with dataparallel.trace() as trace:
        thread = threading.Thread(target=works)
        thread.start()
        inside.wait()
        loss().backward()
    ended.set()
    thread.join()
    assert threading.active_count() == before
    assert [stage.name for stage in trace.results.stages if stage.seconds] == ["backward", "your code"]
    assert trace.results.records == 1
