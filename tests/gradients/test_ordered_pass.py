"""Passes whose sums go on after the slots launch every bucket once, in order, and end: seen by a communication hook.

Passes that fail are in test_reducer_buckets, and in test_comm_hooks_machines and forms/test_machines_failures.
"""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from over_machines import CAP_MB, FIRST_MB, assert_close, batch_of, build, gradients, loss_of
from torch import Tensor, nn
from torch.futures import Future

from dataparallel.composable import replicate
from dataparallel.gradients.comm_hooks import GradBucket

Passes = list[list[list[str]]]
"""The names of the parameters in each launched bucket, for each pass."""


def done(bucket: GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def noted(passes: Passes, bucket: GradBucket) -> Future[Tensor]:
    if bucket.index() == 0:
        passes.append([])
    assert bucket.index() == len(passes[-1])
    assert bucket.is_last() == (bucket.index() == bucket.count - 1)
    passes[-1].append([*bucket.names])
    return done(bucket)


def watched(net: nn.Module, slots: list, passes: Passes, first_mb: float = FIRST_MB, cap_mb: float = CAP_MB) -> Any:
    model: Any = replicate(net, devices=slots, bucket_cap_mb=cap_mb, first_bucket_mb=first_mb)
    model.register_comm_hook(passes, noted)
    return model


@pytest.fixture
def passes() -> Passes:
    return []


@pytest.fixture
def model(root: torch.device, slots: list, passes: Passes) -> Any:
    return watched(build(root), slots, passes)


def test_every_pass_launches_every_bucket_once_and_in_order(model: Any, passes: Passes, root: torch.device) -> None:
    used, names = [*model.first.parameters()], sorted(name for name, _ in model.named_parameters())
    for step in range(4):
        loss_of(model(batch_of(0, step).to(root))).backward(inputs=used if step == 3 else None)
        assert sorted(name for bucket in passes[-1] for name in bucket) == names
    assert len(passes) == 4
    assert len(passes[0]) == len([*model.parameters()])  # before the order is known
    assert len(passes[-1]) < len(passes[0])


@pytest.mark.parametrize("first", [0, 1])
def test_forwards_with_other_copies_are_launched_one_after_the_other(
    root: torch.device, slots: list, first: int
) -> None:
    """Those of another thread have copies of their own."""
    sums: list[Tensor] = []
    model: Any = replicate(build(root), devices=slots, bucket_cap_mb=CAP_MB, first_bucket_mb=FIRST_MB)
    model.register_comm_hook(None, lambda state, bucket: sums.append(bucket.buffer().clone()) or done(bucket))
    x, one = batch_of(0, 0).to(root), build(root)
    with ThreadPoolExecutor(1) as thread:
        losses = [loss_of(model(x)), 10 * thread.submit(lambda: loss_of(model(x))).result()]
    (losses[first] + losses[1 - first]).backward()
    (11 * loss_of(one(x))).backward()
    assert_close(gradients(model), gradients(one))
    half = len(sums) // 2
    assert_close(sums[half:], [10 * each for each in sums[:half]])


class EitherWay(nn.Module):
    """Runs some of its layers, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for k in order:
            x = torch.tanh(self.layers[k](x))
        return x


def test_buckets_are_launched_in_one_order_in_whatever_order_gradients_come(
    root: torch.device, slots: list, passes: Passes
) -> None:
    net = EitherWay().double().to(root)
    one = copy.deepcopy(net)
    model = watched(net, slots, passes, 1e-9, 1e-9)
    for order in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4]):
        for each in (model, one):
            each(torch.ones(6, 4, dtype=torch.float64, device=root), order).sum().backward()
        assert_close(gradients(model), gradients(one))
    assert len(passes[1]) > 5
    assert passes[2:] == [passes[1]] * 2


def fail(grad: Tensor) -> None:
    raise ArithmeticError("in backward")


def test_a_backward_that_does_not_reach_parameters_is_no_pass(model: Any, passes: Passes, root: torch.device) -> None:
    x = batch_of(0, 0).to(root).requires_grad_()
    torch.autograd.grad(loss_of(model(x)), [x])
    handle = model.last.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(loss_of(model(x)), [x])
    handle.remove()
    with model.no_sync():
        loss_of(model(x)).backward()
    assert passes == []


def test_the_graph_holds_no_model(root: torch.device, slots: list) -> None:
    model = watched(build(root), slots, [])
    loss_of(model(batch_of(0, 0).to(root))).backward()
    rows = replicate.state(model).tensors.passes.rows
    gone = weakref.ref(model)
    model.zero_grad()
    del model
    gc.collect()
    assert gone() is None
    assert len(rows) == 0


class Arrived:
    """A reducer of one process, and its passes. What it returns is there and says nothing of streams."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def begin_pass(self, contents: str) -> Arrived:
        return self

    def launch(self, bucket: GradBucket) -> Arrived:
        return Arrived(bucket.summed.mul_(2))

    def end_pass(self, used: Any, order: Any) -> Arrived:
        return Arrived((used, None))

    def wait(self) -> Any:
        return self.result


@pytest.mark.devices("sim", "cuda")
def test_gradients_wait_for_the_sums_that_have_arrived(model: Any, root: torch.device) -> None:
    replicate.state(model).tensors.reduce_by(Arrived())
    one = build(root)
    for step in range(4):
        for net in (one, model):
            net.zero_grad()
            loss_of(net(batch_of(0, step).to(root))).backward()
        assert_close(gradients(model), [None if each is None else 2 * each for each in gradients(one)])
