"""Losses that are made from sharded parameters: they bring gradients past the units, and hooks see all once.

Random ones are drawn by test_state_machine.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.composable import MixedPrecisionPolicy, fully_shard
from dataparallel.testing.steps import assert_equal
from sharded_steps import gradients, whole

WIDTH = 3


class Head(nn.Module):
    """A model on a backbone that another one has too."""

    def __init__(self, backbone: nn.Module, is_recomputed: bool = False) -> None:
        super().__init__()
        self.backbone, self.last, self.is_recomputed = backbone, nn.Linear(WIDTH, 2), is_recomputed

    def forward(self, x: Tensor) -> Tensor:
        below = checkpoint(self.backbone, x, use_reentrant=False) if self.is_recomputed else self.backbone(x)
        return self.last(torch.tanh(below))


def two_heads(device: Any, is_recomputed: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    return nn.ModuleList([Head(backbone, is_recomputed), Head(backbone)]).double().to(device)


@pytest.mark.slots(4)
@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_two_models_may_share_a_unit_and_a_loss(waits, is_recomputed, reshard, slots, root) -> None:
    """Each parameter gets all of its gradient, and its hooks see all of it once in each backward."""
    x = torch.linspace(-1, 1, 6 * WIDTH, dtype=torch.float64, device=root).view(6, WIDTH)
    found = []
    for is_sharded in (True, False):
        heads, seen = two_heads(root, is_recomputed), []
        for unit in (heads[0].backbone, *heads) if is_sharded else ():
            fully_shard(unit, devices=slots, reshard_after_forward=reshard)
        for name, parameter in heads.named_parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, seen=seen: seen.append(name))
        held = []
        for number in range(3):
            for head in heads if is_sharded else ():
                head.set_requires_gradient_sync(not waits or number > 0)
            penalty = sum((p * p).sum() for p in [*heads.parameters()][:: number + 1])
            loss = heads[0](x).square().sum() + penalty + heads[1](x[: number + 1]).square().sum()
            if waits and number == 0 and not is_sharded:
                held.append(loss)  # gradients that wait are clamped with those that they wait for
                continue
            sum([loss, *held]).backward()
            held.clear()
            if not waits or number > 0:
                found.append((gradients(heads), sorted(seen)))
    assert_equal(found[: len(found) // 2], found[len(found) // 2 :], "gradients and hooks", atol=1e-9)


class Calls(list[Any]):
    """The whole gradients that a hook on a parameter was given."""

    def __call__(self, gradient: Tensor) -> None:
        self.append(whole(gradient).flatten().tolist())


def linear(root: torch.device, slots: Sequence[Any], **options: Any) -> tuple[Any, nn.Parameter, Calls]:
    """A sharded linear layer, its weight, which is ones, and the calls of a hook on the weight."""
    model = nn.Linear(2, 1, bias=False).to(root)
    nn.init.ones_(model.weight)
    weight, calls = fully_shard(model, devices=slots, **options).weight, Calls()
    weight.register_hook(calls)
    return model, weight, calls


def gradient_of(weight: Tensor) -> list[float] | None:
    return None if weight.grad is None else whole(weight.grad).flatten().tolist()


@pytest.fixture
def ones(root: torch.device) -> Tensor:
    return torch.ones(3, 2, device=root)


def test_penalties_have_the_precision_of_the_sharded_parameters(slots, root, ones) -> None:
    model, weight, _ = linear(root, slots, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    (model(ones).sum() + (1 + 2**-20) * weight.sum()).backward()
    assert gradient_of(weight) == [4 + 2**-20] * 2


def test_a_gradient_that_starts_a_backward_stays_the_callers(slots, root, ones) -> None:
    model, weight, _ = linear(root, slots)
    model(ones)
    gradient = torch.ones_like(weight)
    for _ in range(2):
        weight.backward(gradient)
    assert whole(gradient).tolist() == [[1, 1]]
    assert gradient_of(weight) == [2, 2]


def test_a_backward_of_a_penalty_alone_keeps_what_a_recorded_one_has_left(slots, root, ones) -> None:
    model, weight, _ = linear(root, slots)
    x = ones.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).exp().sum(), x, create_graph=True)
    (100 * weight.sum()).backward()
    assert gradient_of(weight) == [100, 100]
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, 2 * gradient.detach())


def test_gradients_that_the_engine_returns_or_records_pass_the_hooks_at_once(slots, root, ones) -> None:
    model, weight, calls = linear(root, slots)
    model(ones)
    after: list[Any] = []
    weight.register_hook(lambda gradient: 2 * gradient)
    weight.register_post_accumulate_grad_hook(after.append)
    (returned,) = torch.autograd.grad((weight * weight).sum(), [weight])
    assert whole(returned).tolist() == [[4, 4]]
    assert (calls, after, gradient_of(weight)) == ([[2, 2]], [], None)
    (weight * weight).sum().backward(create_graph=True)
    assert gradient_of(weight) == [4, 4]
    assert (calls, after) == ([[2, 2]] * 2, [weight])
    weight.grad = None  # it refers to its own graph


def test_hooks_stay_when_the_module_gets_other_memory(slots, root, ones) -> None:
    model, weight, calls = linear(root, slots)
    model(ones)
    model.to_empty(device=root)
    nn.init.ones_(weight)
    after = Calls()
    weight.register_post_accumulate_grad_hook(lambda p: after(p.grad))
    (model(ones).sum() + 100 * weight.sum()).backward()
    assert calls == after == [[103, 103]]
