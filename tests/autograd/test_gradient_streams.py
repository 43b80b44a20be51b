"""Gradients travel on side streams: no computation waits for them, and no memory is read or freed too early.

Clocks show a missing order in every run. The rest of the suite uses this room too.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clocked import check_clocks
from dataparallel import DataParallel
from dataparallel.autograd.bucket_gradients import GradientStreams, ReadyEvent, SourceGradients, ToSlots
from dataparallel.comm.routes import Star
from dataparallel.composable import replicate
from graphs import nodes_of
from memory import WITHOUT_LOCK
from nogpu.pytest import settle

pytestmark = [pytest.mark.devices("sim", "cuda"), pytest.mark.usefixtures("distinct")]


@pytest.fixture
def distinct(slots: list) -> None:
    if len({*slots}) < len(slots):
        pytest.skip("nothing travels between slots on one device")


@pytest.fixture
def x(slots: list, root: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2 * len(slots), 8, dtype=torch.float64, generator=generator).to(root)


def build(root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double().to(root)


def wrap(model: nn.Module, slots: list) -> DataParallel:
    """Wraps with a bucket for each parameter, which are more than are held at a time."""
    return DataParallel(model, slots, bucket_cap_mb=1e-9)


def check(model: nn.Module, expected: list[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def keep_in_step(model: nn.Module, layer: int, slots: list) -> None:
    """Makes the root's backward wait before ``layer`` until the other slots' have left it.

    The root's thread sums as soon as it has its own gradients, if the others have theirs.
    """
    root, others = torch.device(slots[0]), threading.Semaphore(0)

    def wait(gradient: Tensor) -> None:
        if gradient.device == root:
            for _ in slots[1:]:
                assert others.acquire(timeout=20)

    def tell(gradient: Tensor) -> None:
        if gradient.device != root:
            others.release()

    on_gradient(model[layer], wait)
    on_gradient(model[layer - 1], tell)


def on_gradient(module: nn.Module, hook: Callable[[Tensor], None]) -> None:
    """Calls the hook with the gradient of each replica's output."""
    module.register_forward_hook(lambda module, args, output: output.register_hook(hook) and None)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """The flat buffers that have travelled to the root."""
    travelled: list[weakref.ref] = []
    side_streams_set = GradientStreams.side_streams_set

    def noted(
        self: GradientStreams, buffers: Sequence[Tensor], ready_events: Sequence[ReadyEvent]
    ) -> AbstractContextManager[None]:
        travelled.extend(map(weakref.ref, buffers[1:-1]))  # the first and the last are the root's, and become gradients
        return side_streams_set(self, buffers, ready_events)

    monkeypatch.setattr(GradientStreams, "side_streams_set", noted)
    return travelled


def are_freed(buffers: list[weakref.ref]) -> bool:
    """True if there were buffers, and they are freed soon: a thread of the engine may be late to drop a failed pass.

    Without Python's lock they are freed when the thread of the engine that made them runs next, or by the collector.
    """
    until = time.monotonic() + 5
    while any(buffer() is not None for buffer in buffers) and time.monotonic() < until:
        time.sleep(0.01)
        if WITHOUT_LOCK:
            gc.collect()
    return len(buffers) > 0 and all(buffer() is None for buffer in buffers)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collects the sums, in the order in which they are launched."""
    launched: list[Tensor] = []
    summed = ToSlots.sum_over_slots

    def noted(ctx: Any, brought: Any) -> SourceGradients:
        grads = summed(ctx, brought).take()
        launched.extend(total.detach() for total in grads)
        return SourceGradients(grads, None, grads[0].device)

    monkeypatch.setattr(ToSlots, "sum_over_slots", noted)
    return launched


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.parametrize("use", [None, "before", "after"])
def test_a_device_that_computes_waits_for_no_sum(
    use: str | None, slots: list, root: torch.device, x: Tensor, sums: list[Tensor]
) -> None:
    """To read a sum during backward is a race, which shows that the computing stream has not waited for the sum.

    This also holds if the loss uses parameters directly, before or after the call.
    """
    model = build(root)
    raised = []

    def read_the_last_sum(gradient: Tensor) -> None:
        if gradient.device == root:
            try:
                sums[-1] + 0
            except RuntimeError as error:
                raised.append(str(error))

    for layer in (4, 2):
        keep_in_step(model, layer, slots)
        on_gradient(model[layer - 2], read_the_last_sum)
    with_penalty(model, wrap(model, slots), use)(x).backward()
    assert len(sums) == 6
    assert len(raised) == 2
    assert all(message.startswith("race") for message in raised), raised


def with_penalty(model: nn.Module, call: nn.Module, use: str | None) -> Callable[[Tensor], Tensor]:
    """A loss that also uses parameters directly, ``before`` the call or ``after`` it."""

    def penalty() -> Tensor:
        return sum(parameter.square().sum() for parameter in model.parameters())

    def loss(x: Tensor) -> Tensor:
        early = penalty() if use == "before" else 0
        loss = call(x).square().sum()
        return loss + early + (penalty() if use == "after" else 0)

    return loss


@pytest.mark.usefixtures("warnings_are_errors")
@pytest.mark.parametrize("form", ["DataParallel", "replicate"])
@pytest.mark.parametrize("use", ["before", "after"])
def test_a_loss_that_uses_parameters_too(
    use: str, form: str, slots: list, root: torch.device, x: Tensor, sums: list[Tensor]
) -> None:
    """A parameter's gradients meet on the caller's stream; torch warns of an ``AccumulateGrad`` on another one."""
    model, twin = build(root), build(root)
    if form == "DataParallel":
        call = wrap(model, slots)
    else:
        call = replicate(model, devices=slots, bucket_cap_mb=1e-9, first_bucket_mb=1e-9)
    for times in range(1, 5):
        with_penalty(model, call, use)(x).backward()
        with_penalty(twin, twin, use)(x).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
        assert len(sums) == times * 6


def test_a_backward_that_fails_leaves_nothing_behind(
    slots: list, root: torch.device, x: Tensor, buffers: list[weakref.ref]
) -> None:
    model = build(root)
    expected = gradients(model, x)
    wrapped = wrap(model, slots)
    is_to_fail = True

    def fail(gradient: Tensor) -> None:
        if is_to_fail and gradient.device == root:
            raise ArithmeticError("from a hook")

    keep_in_step(model, 4, slots)
    on_gradient(model[0], fail)
    output = wrapped(x)
    with pytest.raises(ArithmeticError, match="from a hook"):
        output.square().sum().backward()
    gc.collect()
    assert are_freed(buffers), "although the graph still exists"
    check_clocks()
    is_to_fail = False
    model.zero_grad()
    wrapped(x).square().sum().backward()
    check(model, expected)


def test_a_graph_that_is_kept_holds_no_buffers(
    slots: list, root: torch.device, x: Tensor, buffers: list[weakref.ref]
) -> None:
    model = build(root)
    loss = wrap(model, slots)(x).square().sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert are_freed(buffers)


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.parametrize("how", ["a hook drops it", "its launch fails"])
def test_a_sum_that_nobody_uses_is_not_freed_while_it_is_written(
    how: str, slots: list, root: torch.device, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(root)
    if how == "a hook drops it":
        loss = wrap(model, slots)(x).square().sum()
        for node in nodes_of(loss):
            if node.name() == "ToSlotsBackward":
                node.register_hook(lambda inputs, outputs: (None,))
        loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    else:
        add_up = Star.add_up

        def fail(self: Star, flats: Any, destination: torch.device) -> Tensor:
            add_up(self, flats, destination)
            raise ArithmeticError("from a launch")

        monkeypatch.setattr(Star, "add_up", fail)
        with pytest.raises(ArithmeticError, match="from a launch"):
            wrap(model, slots)(x).square().sum().backward()
    gc.collect()
    settle()


def test_a_gradient_that_is_no_part_of_a_buffer_is_not_freed_while_the_caller_reads_it(
    slots: list, root: torch.device
) -> None:
    """A sparse sum lies in memory of a side stream, which the computing stream reads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8)).to(root)
    wrapped = DataParallel(model, slots)
    for _ in range(3):
        wrapped(torch.arange(2 * len(slots), device=root)).square().sum().backward()
        gradient: Any = model[0].weight.grad
        gradient * 3
        del gradient
        model.zero_grad()
    settle()
