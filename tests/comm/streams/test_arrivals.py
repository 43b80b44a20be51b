"""Parameters travel while replicas compute, and each module waits for its own bucket only.

Clocks tell what a stream has waited for: to touch memory too early is a race.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from at_once import in_threads
from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.comm.streams.current import kept_stream, streams_set
from late_parameters import (
    ARRANGEMENTS,
    WIDTH,
    Net,
    arranged,
    copy_of,
    other_stream,
    samples,
    silently,
    steps,
    trained,
)

pytestmark = [
    pytest.mark.devices("sim", "stand-in"),
    pytest.mark.apart,
    pytest.mark.usefixtures("no_compiler"),
]


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
            stream.wait_stream(kept_stream(weight.device, "parameters"))
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


def test_several_threads_call_one_wrapper(slots: list, root: torch.device, x: Tensor, form: Callable) -> None:
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)

    def run(*_: object) -> None:
        for _ in range(3):
            call(x).sum().backward()

    in_threads(3, run)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_inside_recomputes_with_lookups(
    use_reentrant: bool, slots: list, root: torch.device, form: Callable
) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    model = Checkpointed().double().to(root)
    twin = copy_of(model)
    call = form(model, slots)
    x = torch.randn(8, WIDTH, dtype=torch.float64).to(root).requires_grad_()
    for _ in range(3):
        model.zero_grad()
        call(x).square().sum().backward()
    twin(x.detach()).square().sum().backward()
    for ours, theirs in zip(trained(model), trained(twin), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


def test_a_failure_while_copies_are_sent_leaves_no_race(
    slots: list, root: torch.device, x: Tensor, form: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    with monkeypatch.context() as patch:
        patch.setattr(Arrivals, "expect", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call(x)
    steps(model, call, x)
