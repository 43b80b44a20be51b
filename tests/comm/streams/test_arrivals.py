"""Parameters travel while replicas compute, and each module waits for its own bucket only.

Clocks tell what a stream has waited for: to touch memory too early is a race.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, comm
from dataparallel.comm.streams.arrivals import parameter_stream
from dataparallel.comm.streams.current import streams_set
from dataparallel.composable import replicate
from late_parameters import ARRANGEMENTS, Net, arranged, other_stream, samples, silently, steps

pytestmark = [pytest.mark.devices("sim", "stand-in"), pytest.mark.usefixtures("no_compiler")]


@pytest.fixture(params=[*ARRANGEMENTS])
def slots(request: pytest.FixtureRequest) -> list:
    return arranged(request.param)


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return samples(root)


class Peek:
    """Reads the last layer on another stream, which has only waited for what the slot's stream has done so far.

    ``waits``: it waits for the parameters' side stream too.
    """

    def __init__(self, waits: bool) -> None:
        self.waits, self.peeked = waits, 0
        self.errors: list[tuple[torch.device, str]] = []
        self.seen: set[int] = set()

    def __call__(self, net: nn.Module) -> None:
        weight = silently(net.last, "bias")
        if weight.data_ptr() in self.seen:  # another slot on this device, whose stream has read it
            return
        self.seen.add(weight.data_ptr())
        here = torch.accelerator.current_stream(weight.device)
        stream = other_stream(weight.device, len(self.seen))
        stream.wait_stream(here)
        if self.waits:
            stream.wait_stream(parameter_stream(weight.device))
        self.peeked += 1
        try:
            with torch.no_grad(), streams_set({weight.device: stream}):
                (weight.data + 0).sum()
        except RuntimeError as error:
            self.errors.append((weight.device, str(error)))
        here.wait_stream(stream)


@pytest.mark.parametrize("waits", [False, True])
def test_the_first_layer_does_not_wait_for_the_last_bucket(
    waits: bool, slots: list, root: torch.device, x: Tensor, form: Callable
) -> None:
    """A stream that has waited for the first layer on a slot races with the last copy into that slot's memory."""
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    peek = model.does = Peek(waits)
    for grad in (True, False):
        peek.seen.clear()
        with torch.set_grad_enabled(grad):
            call(x)
    memories = len(slots) if len({*slots}) == 1 else len({*slots})
    assert peek.peeked == 2 * memories
    assert len(peek.errors) == (0 if waits else 2 * (memories - 1)), peek.errors
    assert all(message.startswith("race") for _, message in peek.errors)


def test_the_sources_parameters_are_read_before_slot_0_writes_to_them(
    slots: list, root: torch.device, x: Tensor, form: Callable
) -> None:
    """All replicas write; slot 0's write is the source's."""

    def write(net: nn.Module) -> None:
        with torch.no_grad():
            net.last.bias.mul_(1)
            net.second.weight.data.mul_(1)

    model = Net(write).double().to(root)
    call = form(model, slots)
    for _ in range(3):
        with torch.no_grad():
            call(x)


@pytest.mark.parametrize("route", ["star", "chain"])
@pytest.mark.parametrize("bucket_mb", [1e-9, 25])
def test_values_and_gradients_are_those_of_one_device(
    bucket_mb: float, route: str, slots: list, root: torch.device, x: Tensor
) -> None:
    """A bucket that is large enough goes along a chain in pieces."""
    model, twin = Net().double().to(root), Net().double().to(root)
    other = Net().double().to(root)
    with comm.using(route=route):
        steps(other, replicate(other, devices=slots, bucket_cap_mb=bucket_mb, first_bucket_mb=bucket_mb), x, 4)
        steps(model, DataParallel(model, slots, bucket_cap_mb=bucket_mb), x, 4)
    steps(twin, twin, x, 4)
    for one, two, theirs in zip(model.parameters(), other.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, theirs, rtol=0, atol=1e-12)
        torch.testing.assert_close(two, theirs, rtol=0, atol=1e-12)


def test_inference_between_steps_has_the_values_of_one_device(
    slots: list, root: torch.device, x: Tensor, form: Callable, without_graph: Callable
) -> None:
    model, twin = Net().double().to(root), Net().double().to(root)
    call = form(model, slots)
    for _ in range(4):
        steps(model, call, x, 1)
        steps(twin, twin, x, 1)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        with without_graph():
            torch.testing.assert_close(call(x), twin(x), rtol=0, atol=1e-12)
