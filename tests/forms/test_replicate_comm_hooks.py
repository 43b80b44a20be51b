"""A communication hook on a replicated module, without machines: when it is called, with what, and what comes of it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kept import assert_same, build, gradients, loss, numbers
from loops import SMALL
from torch import Tensor, nn
from torch.futures import Future

from clocked import check_clocks
from dataparallel.comm.streams.current import streams_joined, streams_set
from dataparallel.composable import replicate
from dataparallel.gradients.comm_hooks import GradBucket
from nogpu.pytest import settle

EACH = pytest.mark.slots(2, 1)


def done(tensor: Tensor) -> Future:
    future: Future = Future()
    future.set_result(tensor)
    return future


def unchanged(state: Any, bucket: GradBucket) -> Future:
    return done(bucket.buffer())


def replicated(net: nn.Module, slots: list, hook: Callable[..., Any], state: Any = None) -> Any:
    model = replicate(net, devices=slots, **SMALL)
    model.register_comm_hook(state, hook)
    return model


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss(model(x)).backward()
    return gradients(model)


@EACH
def test_it_is_called_once_for_each_bucket_in_their_order(net, slots, root):
    calls: list[list[tuple[int, bool]]] = []

    def noted(state: Any, bucket: GradBucket) -> Future:
        calls[-1].append((bucket.index(), bucket.is_last()))
        return done(bucket.buffer())

    model = replicated(net, slots, noted)
    for _ in range(3):
        calls.append([])
        step(model, numbers(root, 5))
    assert len(calls[0]) == len([*net.parameters()]), "in the first backward each parameter is a bucket"
    for each in calls:
        assert [index for index, _ in each] == [*range(len(each))]
        assert [last for _, last in each] == [False] * (len(each) - 1) + [True]
    assert 1 < len(calls[1]) == len(calls[2]) < len(calls[0])


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.parametrize("is_later", [False, True], ids=["what waits", "what is summed"])
def test_gradients_that_wait_and_their_sums_may_be_of_forwards_on_different_streams(is_later, slots, root):
    """What the passes leave for each other lies in memory of either stream, which is not free before it was read."""
    model, x = replicated(build(root), slots, unchanged), numbers(root, 6)
    others = {device: torch.Stream(device) for device in {*map(torch.device, slots)}}
    step(model, x)
    for _ in range(2):
        for waits in (True, False):
            with streams_joined(others) if waits != is_later else nullcontext():
                value = loss(model(x))
            with model.no_sync() if waits else nullcontext():
                value.backward()
            del value
        settle()
        check_clocks()


@EACH
def test_its_views_have_the_gradients_of_its_parameters(slots, root):
    """In the order of a contiguous tensor, whatever the strides of the parameter are."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)).double()
    net[0].to(memory_format=torch.channels_last)
    net.to(root)
    seen: dict[int, Tensor] = {}

    def noted(state: Any, bucket: GradBucket) -> Future:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            assert gradient.shape == parameter.shape
            assert gradient.is_contiguous()
            seen[id(parameter)] = gradient.clone()
        return done(bucket.buffer())

    model = replicated(net, slots, noted)
    for _ in range(2):
        step(model, torch.randn(4, 2, 4, 4, dtype=torch.float64, device=root))
        for parameter in net.parameters():
            torch.testing.assert_close(seen[id(parameter)], parameter.grad, rtol=0, atol=0)


@EACH
def test_what_was_not_used_comes_as_zeros_and_has_no_gradient(net, twin, slots, root):
    unused = {id(parameter) for parameter in net.branch.parameters()}
    found: list[Tensor] = []

    def noted(state: Any, bucket: GradBucket) -> Future:
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        found.extend(gradient.clone() for parameter, gradient in pairs if id(parameter) in unused)
        return done(bucket.buffer())

    model = replicated(net, slots, noted)
    x = numbers(root, 4, positive=True)
    for _ in range(3):
        found.clear()
        assert_same(step(model, x), step(twin, x))
        assert len(found) == len(unused)
        assert not any(gradient.any() for gradient in found)
        assert all(parameter.grad is None for parameter in net.branch.parameters())


@EACH
def test_the_next_bucket_waits_for_the_future_of_the_one_before(net, twin, slots, root):
    """The future may be done later, by another thread, on its own stream."""
    under_way: list[int] = []
    most: list[int] = []

    def later(state: Any, bucket: GradBucket) -> Future:
        future: Future = Future()
        under_way.append(bucket.index())
        most.append(len(under_way))
        there = bucket.buffer().device
        event = None if there.type == "cpu" else torch.accelerator.current_stream(there).record_event()

        def finish() -> None:
            time.sleep(0.05)  # the future says nothing of streams, so it has to be watched before it is done
            try:
                if event is not None:
                    torch.accelerator.current_stream(there).wait_event(event)
                result = bucket.buffer() * 2
                under_way.remove(bucket.index())
                future.set_result(result)
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=finish).start()
        return future

    model = replicated(net, slots, later)
    # The thread that ends the future has another current stream than the one that computes.
    with streams_set({} if root.type == "cpu" else {root: torch.Stream(root)}):
        for _ in range(3):
            x = numbers(root, 5)
            assert_same(step(model, x), [None if g is None else 2 * g for g in step(twin, x)])
    assert {*most} == {1}


@EACH
def test_a_backward_that_leaves_out_what_waits_is_refused(net, twin, slots, root):
    model, x = replicated(net, slots, unchanged), numbers(root, 5)
    with model.no_sync():
        loss(model(x)).backward()
    value = loss(model(x))
    with pytest.raises(RuntimeError, match=r"leaves out '.*', whose gradients wait on the slots"):
        value.backward(inputs=[net.first.weight])
    loss(model(x)).backward()
    for _ in range(2):
        loss(twin(x)).backward()
    assert_same(gradients(net), gradients(twin))
    with model.no_sync():
        loss(model(x)).backward()
    net.zero_grad()
    twin.zero_grad()
    loss(model(x)).backward(inputs=[net.first.weight])
    loss(twin(x)).backward(inputs=[twin.first.weight])
    assert_same(gradients(net), gradients(twin))


def test_a_recorded_backward_is_refused(net, slots, root):
    model = replicated(net, slots, unchanged)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*communication hook"):
        torch.autograd.grad(loss(model(numbers(root, 5))), model.first.weight, create_graph=True)
    assert all(each is None for each in gradients(model))


class Broken:
    """A hook that does one call wrongly."""

    def __init__(self, wrong: Callable[[GradBucket], Any]) -> None:
        self.wrong, self.at = wrong, 2

    def __call__(self, state: Any, bucket: GradBucket) -> Any:
        self.at -= 1
        return done(bucket.buffer()) if self.at else self.wrong(bucket)


def raises(bucket: GradBucket) -> Any:
    bucket.buffer().mul_(2)
    raise KeyError("gone")


# What else may be wrong is in tests/gradients/test_comm_hooks.
WRONG: dict[str, Callable[[GradBucket], Any]] = {
    "raises": raises,
    "has another size": lambda bucket: done(bucket.buffer()[:-1]),
    "fails later": lambda bucket: done(bucket.buffer()).then(lambda _: raises(bucket)),
}


@EACH
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_one_changes_nothing_and_the_next_step_works(wrong, net, twin, slots, root):
    x = numbers(root, 5)
    model = replicated(net, slots, Broken(WRONG[wrong]))
    with pytest.raises((RuntimeError, ValueError), match=r"communication hook .*Broken .*bucket 1 of \d+ \("):
        loss(model(x)).backward()
    assert all(each is None for each in gradients(model))
    for _ in range(2):
        assert_same(step(model, x), step(twin, x))


def test_what_cannot_be_called_and_a_second_one_are_errors(net, twin, slots, monkeypatch):
    model = replicate(net, devices=slots)
    with pytest.raises(TypeError, match=r"hook=.*: expected a function .*\. Pass the state first"):
        model.register_comm_hook(unchanged, None)
    model.register_comm_hook(None, unchanged)
    with pytest.raises(RuntimeError, match="has the communication hook unchanged already"):
        model.register_comm_hook(None, unchanged)
    monkeypatch.setattr("dataparallel.devices.all_devices", list)
    with pytest.raises(RuntimeError, match=r"devices=\['cpu'\]"):
        replicate(twin).register_comm_hook(None, unchanged)


@pytest.mark.devices("sim")
def test_what_a_failed_pass_has_no_memory_for_is_told(net, slots, root, caplog):
    """A destructor ends the pass, and its error would reach nobody."""
    fails: list[bool] = []

    def hook(state: None, bucket: GradBucket) -> Future:
        if fails:
            torch.sim.set_memory_capacity(1, root)
            raise ArithmeticError
        return done(bucket.buffer())

    model = replicated(net, slots, hook)
    step(model, numbers(root, 5))
    fails.append(True)
    try:
        with pytest.raises(RuntimeError, match="hook"):
            step(model, numbers(root, 5))
        # The pass ends when the last thread of the engine has left it, which may be after its error has been raised.
        until = time.monotonic() + 60
        while "does not get all buckets" not in caplog.text:
            assert time.monotonic() < until
            gc.collect()
            time.sleep(0.01)
    finally:
        torch.sim.set_memory_capacity(None, root)
    fails.clear()
    step(model, numbers(root, 5))
