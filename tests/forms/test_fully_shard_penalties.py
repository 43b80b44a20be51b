"""Losses that are made from sharded parameters, and losses of two models that share a unit, give what one device gives.

A penalty on weights brings gradients past the units: before, between or after those that units sum. Each parameter gets
all of its gradient, and its hooks see all of it once in each backward, in float64 to 1e-9.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.composable import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from dataparallel.testing.steps import assert_equal
from nogpu.pytest import settle
from sharded_steps import gradients, whole

SLOTS, WIDTH = 4, 3
PHASES = [phase for phase in Phase if phase != Phase.explain]

PENALTIES = {
    "square": lambda p: (p * p).sum(),
    "sum": lambda p: 3 * p.sum(),  # its gradient is plain, and sharded when it is accumulated
    "norm": lambda p: p.norm(),
    "two terms": lambda p: p.exp().mean() + 2 * p.sum(),
}


class Head(nn.Module):
    """A model on a backbone that another one has too."""

    def __init__(self, backbone: nn.Module, is_recomputed: bool = False) -> None:
        super().__init__()
        self.backbone, self.last, self.is_recomputed = backbone, nn.Linear(WIDTH, 2), is_recomputed

    def forward(self, x: Tensor) -> Tensor:
        below = checkpoint(self.backbone, x, use_reentrant=False) if self.is_recomputed else self.backbone(x)
        return self.last(torch.tanh(below))


def two_heads(device: Any, is_recomputed: bool = False) -> nn.ModuleList:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    return nn.ModuleList([Head(backbone, is_recomputed), Head(backbone)]).double().to(device)


def shard(heads: Any, slots: Sequence[Any], **options: Any) -> None:
    fully_shard(heads[0].backbone, devices=slots, **options)
    for head in heads:
        fully_shard(head, devices=slots, **options)


@dataclass(frozen=True)
class Use:
    """A term of a loss: a head (0 or 1) of a batch, or a penalty on some parameters."""

    what: int | str
    samples: int
    on: int

    def of(self, heads: Any, parameters: Sequence[Tensor], x: Tensor) -> Any:
        if isinstance(self.what, int):
            return heads[self.what](x[: self.samples]).square().sum()
        trainable = [p for at, p in enumerate(parameters) if self.on >> at & 1 and p.requires_grad]
        return sum(map(PENALTIES[self.what], trainable))


@dataclass(frozen=True)
class Case:
    """Two heads on one backbone.

    Attributes:
        losses: the terms of each, in the order in which they are computed. Each has a backward.
        waiting: of which losses the gradients wait for the next sum.
        reshard: ``reshard_after_forward``.
        frozen, clamped: bits of the parameters that need no gradient, and of those with a hook that changes it.
    """

    losses: tuple[tuple[Use, ...], ...]
    waiting: tuple[bool, ...]
    reshard: bool | int
    is_offloaded: bool
    is_recomputed: bool
    frozen: int
    clamped: int


uses = st.builds(
    Use, st.sampled_from([0, 0, 1, 1, *PENALTIES]), samples=st.integers(1, SLOTS + 2), on=st.integers(1, 255)
)
cases = st.builds(
    Case,
    st.lists(st.lists(uses, min_size=1, max_size=4).map(tuple), min_size=1, max_size=3).map(tuple),
    waiting=st.tuples(*[st.sampled_from([False, False, True])] * 3),
    reshard=st.sampled_from([True, True, False, 2]),
    is_offloaded=st.booleans(),
    is_recomputed=st.booleans(),
    frozen=st.sampled_from([0, 0, 1, 5, 7, 10, 24]),
    clamped=st.integers(0, 127),
)


@dataclass
class Seen:
    """How often the hooks of each parameter ran."""

    before: Counter = field(default_factory=Counter)
    after: Counter = field(default_factory=Counter)


def add_hooks(heads: Any, clamped: int) -> Seen:
    seen = Seen()
    for at, (name, parameter) in enumerate(heads.named_parameters()):
        if not parameter.requires_grad:
            continue
        if clamped >> at & 1:

            def clamp(gradient: Tensor, name: str = name) -> Tensor:
                seen.before[name] += 1
                return gradient.clamp(-1, 1)

            parameter.register_hook(clamp)
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.after.update([name]))
    return seen


def run(case: Case, heads: Any, x: Tensor, is_sharded: bool) -> list[Any]:
    """The gradients after each backward that sums, and how often hooks ran."""
    for at, parameter in enumerate(heads.parameters()):
        parameter.requires_grad_(not case.frozen >> at & 1)
    seen, found, held = add_hooks(heads, case.clamped), [], []
    with torch.no_grad():
        for head in heads:  # a unit that has not been called sums nothing, and lets nothing wait
            head(x)
    heads_too = (Use(0, SLOTS, 0), Use(1, 2, 0))  # a backward that sums reaches both trees, so that nothing waits on
    for at, (terms, waits) in enumerate(zip(case.losses, case.waiting, strict=False)):
        waits = waits and at + 1 < len(case.losses)
        has_waited = bool(held) or (at > 0 and case.waiting[at - 1])
        for head in heads if is_sharded else ():
            head.set_requires_gradient_sync(not waits)
        terms = terms if not has_waited or waits else (*terms, *heads_too)
        losses = [use.of(heads, [*heads.parameters()], x) for use in terms]
        loss = sum(losses) + 0 * x.sum().requires_grad_()
        if waits and not is_sharded:
            held.append(loss)
            continue
        sum([*held, loss]).backward()
        held.clear()
        if not waits:
            found.append((gradients(heads), dict(sorted(seen.before.items())), dict(sorted(seen.after.items()))))
    return found


def check(case: Case, slots: Sequence[Any], root: torch.device) -> None:
    x = torch.randn(SLOTS + 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(root)
    heads, one = (two_heads(root, case.is_recomputed) for _ in range(2))
    policy = {"offload_policy": CPUOffloadPolicy()} if case.is_offloaded else {}
    shard(heads, slots, reshard_after_forward=case.reshard, **policy)
    expected = run(case, one, x, False)
    found = run(case, heads, x, True)
    settle()
    assert_equal(found, expected, "gradients and hooks", atol=1e-9)


@given(cases)
@settings(phases=PHASES, suppress_health_check=[*HealthCheck])
def test_random_losses_give_the_gradients_of_one_device_and_run_hooks_once(make_slots, case) -> None:
    slots = make_slots(SLOTS)
    check(case, slots, torch.device(slots[0]))


@pytest.mark.long
@pytest.mark.watchdog(3600)
@given(cases)
@settings(max_examples=300, phases=PHASES, suppress_health_check=[*HealthCheck])
def test_many_random_losses(make_slots, case) -> None:
    slots = make_slots(SLOTS)
    check(case, slots, torch.device(slots[0]))


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


def test_a_backward_that_fails_leaves_no_part_of_a_penalty(slots, root, ones) -> None:
    def fail(gradient: Tensor) -> None:
        raise ValueError("in backward")

    model, weight, calls = linear(root, slots)
    with model.no_sync():
        (100 * weight.sum() + model(ones).sum()).backward()
    output = model(ones)
    output.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        (output.sum() + 1000 * weight.sum()).backward()
    assert gradient_of(weight) == [0, 0]
    (model(ones).sum() + 100 * weight.sum()).backward()
    assert gradient_of(weight) == [206, 206]
    assert calls == [[206, 206]]


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
