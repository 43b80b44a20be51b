"""Passes whose sums go on after the slots launch every bucket once, in order, and end, whatever happens."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from over_machines import CAP_MB, FIRST_MB, Branches, assert_close, batch_of, build, gradients, loss_of
from torch import Tensor

from dataparallel.composable import replicate
from dataparallel.gradients.comm_hooks import GradBucket
from freed_later import freed_later


class Arrived:
    """Something that is there."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result()


class Recorder:
    """An `Reducer` of one process that notes its calls. ``change`` makes what arrives of a sum."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda flat: flat) -> None:
        self.change = change
        self.passes: list[Recorder] = []
        self.log: list[Recorder] = []  # the pass of each launch
        self.contents = ""
        self.launched: list[GradBucket] = []
        self.ends: list[Sequence[bool]] = []
        self.failures: list[BaseException] = []

    def begin_pass(self, contents: str) -> Recorder:
        self.passes.append(Recorder(self.change))
        self.passes[-1].contents, self.passes[-1].log = contents, self.log
        return self.passes[-1]

    def fail(self, error: BaseException, missing: Iterator[GradBucket]) -> None:
        self.failures.append(error)

    def launch(self, sums: GradBucket) -> Arrived:
        self.launched.append(sums)
        self.log.append(self)
        return Arrived(lambda: self.change(sums.summed))

    def end_pass(self, used: Sequence[bool], order: Sequence[int] | None) -> Arrived:
        self.ends.append(used)
        return Arrived(lambda: (used, None))


def followed(net: Branches, slots: list, recorder: Recorder) -> Any:
    model = replicate(net, devices=slots, bucket_cap_mb=CAP_MB, first_bucket_mb=FIRST_MB)
    replicate.state(model).tensors.reduce_by(recorder)
    return model


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def model(root: torch.device, slots: list, recorder: Recorder) -> Any:
    return followed(build(root), slots, recorder)


def names_in(recorder: Recorder) -> list[str]:
    return [name for sums in recorder.launched for name in sums.names]


def test_every_pass_launches_every_bucket_once_and_in_order(model: Any, recorder: Recorder, root: torch.device) -> None:
    used = [*model.first.parameters()]
    for step in range(4):
        x = batch_of(0, step).to(root)
        loss_of(model(x)).backward(inputs=used if step == 3 else None)
        this = recorder.passes[-1]
        assert [sums.index() for sums in this.launched] == [*range(this.launched[0].count)]
        assert sorted(names_in(this)) == sorted(name for name, _ in model.named_parameters())
        assert len(this.ends) == 1
    assert len(recorder.passes) == 4
    assert len(recorder.passes[0].launched) == len([*model.parameters()])  # before the order is known
    assert len(recorder.passes[-1].launched) < len(recorder.passes[0].launched)
    assert all(each.failures == [] for each in recorder.passes)


@pytest.mark.parametrize("first", [0, 1])
def test_forwards_with_other_copies_are_launched_one_after_the_other(
    model: Any, recorder: Recorder, root: torch.device, first: int
) -> None:
    """Those of another thread have copies of their own."""
    x, one = batch_of(0, 0).to(root), build(root)
    with ThreadPoolExecutor(1) as thread:
        losses = [loss_of(model(x)), thread.submit(lambda: loss_of(model(x))).result()]
    (losses[first] + losses[1 - first]).backward()
    (2 * loss_of(one(x))).backward()
    assert_close(gradients(model), gradients(one))
    older, newer = recorder.passes
    assert recorder.log == [older] * len(older.launched) + [newer] * len(newer.launched)
    assert [len(each.ends) for each in recorder.passes] == [1, 1]


class EitherWay(torch.nn.Module):
    """Runs some of its layers, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for k in order:
            x = torch.tanh(self.layers[k](x))
        return x


def test_buckets_are_launched_in_one_order_in_whatever_order_gradients_come(
    root: torch.device, slots: list, recorder: Recorder
) -> None:
    net = EitherWay().double().to(root)
    one = copy.deepcopy(net)
    model = replicate(net, devices=slots, bucket_cap_mb=1e-9, first_bucket_mb=1e-9)
    replicate.state(model).tensors.reduce_by(recorder)
    for order in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4]):
        for each in (model, one):
            each(torch.ones(6, 4, dtype=torch.float64, device=root), order).sum().backward()
        assert_close(gradients(model), gradients(one))
    first, *others = [names_in(each) for each in recorder.passes[1:]]
    assert len(recorder.passes[1].launched) > 5
    assert others == [first, first]


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_are_what_has_arrived(
    model: Any, recorder: Recorder, root: torch.device, slots: list, steps: int
) -> None:
    """Also where the result is another tensor than the sum, which nobody reads then."""
    recorder.change = lambda flat: torch.full_like(flat, 3)
    for step in range(steps):
        model.zero_grad()
        loss_of(model(batch_of(0, step).abs().to(root))).backward()
        held = [torch.full((600,), 1.0, device=root) for _ in range(3)]  # takes the memory of sums that are free
    for name, parameter in model.named_parameters():
        is_used = not name.startswith(("unused", "branch"))
        assert (parameter.grad is not None) is is_used, name
        assert parameter.grad is None or bool((parameter.grad == 3).all()), name
    del held


def test_the_sum_itself_may_arrive(model: Any, recorder: Recorder, root: torch.device) -> None:
    recorder.change = lambda flat: flat.mul_(2)
    one = build(root)
    for step in range(4):
        x = batch_of(0, step).to(root)
        for net in (one, model):
            net.zero_grad()
        loss_of(model(x)).backward()
        (2 * loss_of(one(x))).backward()
        assert_close(gradients(model), gradients(one))


class Failing(torch.autograd.Function):
    """The identity; its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


@freed_later
def test_a_pass_that_fails_before_it_launches_is_told(model: Any, recorder: Recorder, root: torch.device) -> None:
    x = batch_of(0, 0).to(root)
    model.last.register_forward_hook(lambda module, args, output: Failing.apply(output))
    with pytest.raises(ArithmeticError):
        loss_of(model(x)).backward()
    until = time.monotonic() + 20  # the pass ends when the engine's threads have left it
    while not recorder.passes[0].failures and time.monotonic() < until:
        time.sleep(0.01)
    ((launched, failures),) = [(each.launched, each.failures) for each in recorder.passes]
    assert (len(launched), len(failures)) == (0, 1)


@pytest.mark.devices("cpu")
def test_a_pass_that_fails_on_its_way_is_told_and_keeps_what_waits(
    model: Any, recorder: Recorder, root: torch.device
) -> None:
    x = batch_of(0, 0).to(root)
    for _ in range(2):  # learns the order
        loss_of(model(x)).backward()
        model.zero_grad()
    recorder.passes.clear()
    with model.no_sync():
        loss_of(model(x)).backward()

    def fail(module: torch.nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        """On slot 0, whose backward comes last."""
        return Failing.apply(output) if torch.equal(args[0][0], x[0]) else output

    handle = model.first.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model(x)).backward()
    (failed,) = recorder.passes
    assert 0 < len(failed.launched) < failed.launched[0].count
    assert (len(failed.ends), len(failed.failures)) == (0, 1)
    handle.remove()
    loss_of(model(x)).backward()  # what waited on the slots waits still
    one = build(root)
    for _ in range(2):
        loss_of(one(x)).backward()
    assert_close(gradients(model), gradients(one))


def test_a_backward_that_does_not_reach_parameters_is_no_pass(
    model: Any, recorder: Recorder, root: torch.device
) -> None:
    x = batch_of(0, 0).to(root).requires_grad_()
    torch.autograd.grad(loss_of(model(x)), [x])
    handle = model.last.register_forward_hook(lambda module, args, output: Failing.apply(output))
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(loss_of(model(x)), [x])
    handle.remove()
    with model.no_sync():
        loss_of(model(x)).backward()
    assert recorder.passes == []


def test_the_graph_holds_no_model(root: torch.device, slots: list, recorder: Recorder) -> None:
    import weakref

    model = followed(build(root), slots, recorder)
    loss_of(model(batch_of(0, 0).to(root))).backward()
    rows = replicate.state(model).tensors.passes.rows
    gone = weakref.ref(model)
    model.zero_grad()
    recorder.passes.clear()
    del model
    gc.collect()
    assert gone() is None
    assert len(rows) == 0
