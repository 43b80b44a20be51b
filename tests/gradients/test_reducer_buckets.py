"""Where sums go on after the slots, gradients wait by the rule of one machine: ``.grad`` shows those of slot 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kept import Branched, assert_same, build, gradients, kept_on_slots, loss, numbers
from loops import wait_for_the_engine
from torch import Tensor
from torch.futures import Future

from dataparallel.composable import replicate
from dataparallel.gradients.comm_hooks import GradBucket
from freed_later import freed_later

EACH = pytest.mark.slots(3, 1)


class Hook:
    """Doubles the sums. ``fails``: raises instead."""

    fails = False

    def __call__(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        if self.fails:
            raise ArithmeticError
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer().mul_(2))
        return future


@pytest.fixture
def net(root: torch.device) -> Branched:
    return build(root)


@pytest.fixture
def twin(root: torch.device) -> Branched:
    """The same, for one device."""
    return build(root)


@pytest.fixture
def hook() -> Hook:
    return Hook()


@pytest.fixture
def model(net: Branched, slots: list, hook: Hook) -> Any:
    model = replicate(net, devices=slots, first_bucket_mb=64 / 2**20, bucket_cap_mb=600 / 2**20)
    model.register_comm_hook(None, hook)
    return model


def doubled(grads: list[Tensor | None]) -> list[Tensor | None]:
    return [None if grad is None else 2 * grad for grad in grads]


def batches(root: torch.device, slots: list) -> list[Tensor]:
    """Two samples for each slot. All take the branch."""
    found = [numbers(root, 2 * len(slots), seed=seed) for seed in range(3)]
    for x in found:
        x[:, 0] = -x[:, 0].abs()
    return found


@EACH
@pytest.mark.parametrize("has_sums", [False, True], ids=["none before", "sums before"])
def test_grad_is_what_was_there_and_slot_0s(model, twin, slots, root, has_sums):
    first, second, third = batches(root, slots)
    expected = [torch.zeros_like(parameter) for parameter in twin.parameters()]
    if has_sums:
        loss(model(first)).backward()
        loss(twin(first)).backward()
        expected = [2 * grad for grad in gradients(twin)]
        twin.zero_grad()
    with model.no_sync():
        loss(model(second)).backward()
    loss(twin(second[:2])).backward()
    assert_same(gradients(model), [sum(each) for each in zip(expected, gradients(twin), strict=True)])
    loss(model(third)).backward()
    loss(twin(second[2:])).backward()
    loss(twin(third)).backward()
    assert_same(gradients(model), [a + 2 * b for a, b in zip(expected, gradients(twin), strict=True)])


@EACH
def test_a_hook_on_a_parameter_changes_each_gradient_once(model, twin, slots, root):
    first, second, _ = batches(root, slots)
    for net in (model, twin):
        net.first.weight.register_hook(lambda grad: grad * 3)
    with model.no_sync():
        loss(model(first)).backward()
    loss(model(second)).backward()
    (loss(twin(first)) + loss(twin(second))).backward()
    assert_same(gradients(model), doubled(gradients(twin)))


@freed_later
@EACH
@pytest.mark.parametrize("has_sums", [False, True], ids=["none before", "sums before"])
def test_a_pass_that_fails_leaves_all_as_it_was(model, twin, hook, slots, root, has_sums):
    first, second, third = batches(root, slots)
    if has_sums:
        loss(model(first)).backward()
        loss(twin(first)).backward()
    with model.no_sync():
        loss(model(second)).backward()
    before, waiting = gradients(model), kept_on_slots(model)
    hook.fails = True
    with pytest.raises(RuntimeError, match="ArithmeticError"):
        loss(model(third)).backward()
    wait_for_the_engine(slots)
    assert_same(gradients(model), before)
    assert kept_on_slots(model) == waiting
    hook.fails = False
    loss(model(third)).backward()
    loss(twin(second)).backward()
    loss(twin(third)).backward()
    assert_same(gradients(model), doubled(gradients(twin)))


@EACH
def test_what_another_backward_adds_goes_on_too(model, twin, slots, root):
    """As with ``DistributedDataParallel``."""
    first, second, _ = batches(root, slots)
    with model.no_sync():
        loss(model(first)).backward()
    model.first.weight.square().sum().backward()
    loss(model(second)).backward()
    (loss(twin(first)) + loss(twin(second)) + twin.first.weight.square().sum()).backward()
    assert_same(gradients(model), doubled(gradients(twin)))


@EACH
@pytest.mark.parametrize("to_none", [False, True], ids=["zeros", "none"])
def test_what_is_thrown_away_does_not_go_on(model, twin, slots, root, to_none):
    first, second, third = batches(root, slots)
    loss(model(first)).backward()
    for x in (first, second):
        with model.no_sync():
            loss(model(x)).backward()
        model.zero_grad(set_to_none=to_none)
    assert to_none or kept_on_slots(model) > 0 or len(slots) == 1
    with model.no_sync():
        loss(model(second)).backward()
    loss(model(third)).backward()
    (loss(twin(second)) + loss(twin(third))).backward()
    assert_same(gradients(model), doubled(gradients(twin)))
    assert kept_on_slots(model) == 0
