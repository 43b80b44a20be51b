"""Each thread's current streams are its own again after every block, and events order what they name.

Clocks show a missing order whatever the timing; GPUs only show wrong numbers, now and then.
"""

import ast
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dataparallel
from backends_events import as_of_backend
from dataparallel import DataParallel
from dataparallel.comm.streams.current import (
    Event,
    GivenEvents,
    current_streams,
    kept_stream,
    streams_joined,
    streams_set,
)
from steps import build, gradients, numbers

pytestmark = pytest.mark.devices("sim", "cuda")


def streams_of(slots: list) -> dict[torch.device, torch.Stream]:
    return current_streams([torch.device(slot) for slot in slots])


@pytest.mark.devices("sim", "stand-in")
def test_what_a_block_that_raises_has_launched_comes_first_too(root: torch.device) -> None:
    def fail(x: Tensor) -> None:
        with streams_joined({x.device: kept_stream(x.device, "gradients")}):
            x.add_(1)
            raise ArithmeticError

    x = torch.zeros(4, device=root)
    with pytest.raises(ArithmeticError):
        fail(x)
    assert x.mul(2).tolist() == [2.0] * 4


def test_streams_are_current_inside_and_the_device_stays(slots: list) -> None:
    before, here = streams_of(slots), torch.accelerator.current_device_index()
    sides = {device: kept_stream(device, "gradients") for device in before}

    def fail() -> None:
        with streams_set(sides):
            assert streams_of(slots) == sides
            assert torch.accelerator.current_device_index() == here
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert streams_of(slots) == before
    assert torch.accelerator.current_device_index() == here


@pytest.mark.devices("sim", "stand-in")
def test_an_event_holds_a_stream_back_until_what_was_launched_before_it(root: torch.device) -> None:
    side = torch.Stream(root)
    x = torch.ones(2, device=root)
    event = Event(torch.accelerator.current_stream(root))
    with streams_set({root: side}), pytest.raises(RuntimeError, match="race"):
        x.add_(1)
    event.make_wait(side)
    with streams_set({root: side}):
        x.add_(1)
    Event(side).synchronize()
    assert x.tolist() == [2, 2]


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.parametrize("made_by", [Event, lambda stream: GivenEvents([stream.record_event()])], ids=["us", "a user"])
def test_streams_wait_for_events_that_the_backends_own_streams_record(made_by: Callable, root: torch.device) -> None:
    side = torch.Stream(root)
    x = torch.ones(2, device=root)
    made_by(as_of_backend(torch.accelerator.current_stream(root))).make_wait(side)
    with streams_set({root: side}):
        x.add_(1)  # the clocks see it
    made_by(as_of_backend(side)).synchronize()
    assert x.tolist() == [2, 2]


def test_waits_are_made_in_one_way() -> None:
    """``torch.Stream.wait_event`` orders nothing after an event of ``torch.cuda.Event``, and says nothing."""
    package = Path(dataparallel.__file__).parent
    sources = {str(path.relative_to(package)): path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    assert len(sources) > 40
    found = [
        f"{path}:{node.lineno}"
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "wait_event"
    ]
    assert found == []


@pytest.mark.devices("sim", "stand-in")
def test_what_the_caller_has_waited_for_the_replicas_know_on_any_stream(slots: list, root: torch.device) -> None:
    """The caller also knows the streams that a replica has waited for."""
    devices = [torch.device(slot) for slot in slots]
    x = torch.ones(len(slots), 2, device=root)
    DataParallel(nn.Identity(), slots)(x)  # so that its worker threads exist, with the waits that they know
    tables = {}
    for device in devices:
        with (side := torch.Stream(device)):
            tables[device] = torch.full((2,), 3.0, device=device)
        side.synchronize()
    made = {}

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with (fresh := torch.Stream(x.device)):  # only the host's wait orders this stream
                made[x.device] = tables[x.device] * 2
            fresh.synchronize()
            return x * 1

    DataParallel(Uses(), slots)(x)
    assert {*made} == {*devices}
    for device, tensor in made.items():
        with torch.Stream(device):
            tensor.add_(1)
        torch.accelerator.synchronize(device)
        assert tensor.tolist() == [7, 7]


def on_a_stream_of_its_own(root: torch.device) -> torch.Stream:
    """Makes a new stream current in this thread."""
    mine = torch.Stream(root)
    mine.wait_stream(torch.accelerator.current_stream(root))
    torch.accelerator.set_stream(mine)
    return mine


@pytest.mark.slots(2)
def test_two_threads_with_wrappers_and_streams_of_their_own(slots: list, root: torch.device) -> None:
    start = threading.Barrier(2)

    def steps() -> set[bool]:
        mine = on_a_stream_of_its_own(root)
        model, x = build(root), numbers(root)
        expected = gradients(model(x).square().sum(), model, x)
        wrapped, stayed = DataParallel(model, slots), set()
        start.wait(20)
        for _ in range(40):
            output = wrapped(x)
            stayed.add(torch.accelerator.current_stream(root) == mine)
            found = gradients(output.square().sum(), model, x)
            stayed.add(torch.accelerator.current_stream(root) == mine)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        return stayed

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(steps) for _ in range(2)]:
            assert done.result(60) == {True}
