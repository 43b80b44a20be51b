"""Passes that write only some gradients, ``backward(inputs=...)``, mixed with others, end as on one device."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_same_loop, mean_square, waits
from persistent import (
    Branched,
    assert_same,
    build,
    gradients,
    kept_on_slots,
    loss,
    numbers,
    tensors_of,
    with_persistent_replicas,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, comm
from dataparallel.testing.cases import seeded

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
]

NAMES = [name for name, _ in Branched().named_parameters()]
SUBSETS = [
    ["first.weight"],
    ["last.bias"],
    ["last.weight"],
    ["branch.bias", "second.weight"],
    ["first.bias", "first.weight"],
]


def inputs_of(module: nn.Module, names: list[str]) -> list[Tensor]:
    return [module.get_parameter(name) for name in names]


@pytest.fixture
def wrapped(net: Branched, slots: list, root: torch.device) -> DataParallel:
    """After the steps in which the order of gradients is learnt."""
    wrapped = with_persistent_replicas(net, slots)
    for _ in range(2):
        loss(wrapped(numbers(root, 2 * len(slots)))).backward()
        net.zero_grad()
    return wrapped


@pytest.mark.parametrize("names", SUBSETS, ids=", ".join)
def test_what_waits_is_there_when_a_pass_has_ended_that_reaches_some(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device, names: list[str]
) -> None:
    for _ in range(2):
        for call, module in ((wrapped, net), (twin, twin)):
            module.zero_grad()
            tensors_of(wrapped).sums.are_on = False
            loss(call(numbers(root, 2 * len(slots), seed=1))).backward()
            assert kept_on_slots(wrapped) > 0 or module is twin
            tensors_of(wrapped).sums.are_on = True
            loss(call(numbers(root, 2 * len(slots), seed=2))).backward(inputs=inputs_of(module, names))
        assert kept_on_slots(wrapped) == 0
        assert_same(gradients(net), gradients(twin))
        for call in (wrapped, twin):
            loss(call(numbers(root, 2 * len(slots), seed=3))).backward()
        assert_same(gradients(net), gradients(twin))


@pytest.mark.parametrize("names", SUBSETS, ids=", ".join)
def test_a_pass_that_keeps_gradients_keeps_those_that_it_writes(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device, names: list[str]
) -> None:
    tensors_of(wrapped).sums.are_on = False
    for call, module in ((wrapped, net), (twin, twin)):
        loss(call(numbers(root, 2 * len(slots), seed=1))).backward(inputs=inputs_of(module, names))
    written = {name for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert written == {*names}
    sources = [bucket.sources[source] for bucket in tensors_of(wrapped).sums.buckets for _, source in bucket._kept]
    assert {id(source) for source in sources} == {id(parameter) for parameter in inputs_of(net, names)}
    tensors_of(wrapped).sums.are_on = True
    for call in (wrapped, twin):
        loss(call(numbers(root, 2 * len(slots), seed=2))).backward()
    assert_same(gradients(net), gradients(twin))


@pytest.mark.parametrize("name", NAMES)
def test_hooks_see_the_complete_sum(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device, name: str
) -> None:
    """The parameter that the pass reaches need not be the first of its bucket."""
    seen: list[list[Tensor | None]] = []
    for call, module in ((wrapped, net), (twin, twin)):
        tensors_of(wrapped).sums.are_on = False
        loss(call(numbers(root, 2 * len(slots), seed=1))).backward()
        tensors_of(wrapped).sums.are_on = True
        seen.append([])
        (parameter,) = inputs_of(module, [name])
        parameter.register_post_accumulate_grad_hook(lambda p, seen=seen[-1]: seen.append(p.grad.clone()))
        loss(call(numbers(root, 2 * len(slots), seed=2))).backward(inputs=[parameter])
    assert len(seen[0]) == 1
    assert_same(*seen)


def test_a_bucket_that_is_not_reached_sends_nothing(
    wrapped: DataParallel, net: Branched, slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node runs nevertheless, because the order of sums needs it."""
    assert len(tensors_of(wrapped).sums.buckets) > 2
    sums: list[Any] = []
    for name in ("add_flat", "reduce_add_coalesced"):
        plain: Callable = getattr(comm, name)
        monkeypatch.setattr(
            comm, name, lambda *args, plain=plain, **kwargs: (sums.append(1), plain(*args, **kwargs))[1]
        )
    for name in NAMES:
        sums.clear()
        loss(wrapped(numbers(root, 2 * len(slots)))).backward(inputs=inputs_of(net, [name]))
        assert len(sums) == 1
        sums.clear()
        torch.autograd.grad(loss(wrapped(numbers(root, 2 * len(slots)))), inputs_of(net, [name]))
        assert len(sums) == 1


@pytest.mark.parametrize("are_on", [True, False])
def test_a_recorded_pass_loses_nothing(
    wrapped: DataParallel, net: Branched, twin: Branched, slots: list, root: torch.device, are_on: bool
) -> None:
    """It puts another tensor in the place of ``.grad``."""
    for call in (wrapped, twin):
        tensors_of(wrapped).sums.are_on = False
        loss(call(numbers(root, 2 * len(slots), seed=1))).backward()
        tensors_of(wrapped).sums.are_on = are_on
        loss(call(numbers(root, 2 * len(slots), seed=2))).backward(create_graph=True)
    assert kept_on_slots(wrapped) == 0
    assert_same([each.detach() for each in gradients(net)], [each.detach() for each in gradients(twin)])
    tensors_of(wrapped).sums.are_on = True
    for module in (net, twin):
        penalty = sum(parameter.grad.square().sum() for parameter in module.parameters())
        for parameter in module.parameters():
            parameter.grad = None
        penalty.backward()
    assert_same(gradients(net), gradients(twin))


class Computed(nn.Module):
    """With a buffer that is computed from a parameter, in one bucket with others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)
        self.register_buffer("squared", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.squared)


@pytest.mark.parametrize("again", [True, False], ids=["at each step", "once"])
def test_gradients_of_a_buffer_that_was_computed_do_not_wait(slots: list, root: torch.device, again: bool) -> None:
    """If it is kept, it gets into one bucket with parameters."""

    def loop(net: Computed) -> None:
        net.squared = net.scale.square()
        for step in range(6):
            if again:
                net.squared = net.scale.square()
            with waits(net) if step in (2, 4) else nullcontext():
                mean_square(net(numbers(root, 2 * len(slots), seed=step))).backward(retain_graph=True)
        net.squared = net.squared.detach()

    assert_same_loop(loop, slots, seeded(Computed))


def test_a_question_that_goes_through_a_computed_buffer_takes_nothing(slots: list, root: torch.device) -> None:
    net = seeded(Computed)().to(root)
    wrapped = with_persistent_replicas(net, slots)
    net.squared = net.scale.square()
    x = numbers(root, 2 * len(slots))
    for are_on in (True, True, False):
        tensors_of(wrapped).sums.are_on = are_on
        loss(wrapped(x)).backward(inputs=[net.linear.weight], retain_graph=True)
    tensors_of(wrapped).sums.are_on = True
    before = kept_on_slots(wrapped)
    torch.autograd.grad(loss(wrapped(x)), [net.scale])
    assert kept_on_slots(wrapped) == before > 0


class Checkpointed(Branched):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


@pytest.mark.parametrize("rounds", [6])
def test_with_reentrant_checkpoints_nothing_counts_twice(slots: list, root: torch.device, rounds: int) -> None:
    """Each slot has its own inner pass, and several of these run at the same time."""
    net, twin = build(root), build(root)
    net.__class__ = twin.__class__ = Checkpointed
    wrapped = with_persistent_replicas(net, slots)
    for step in range(3 * rounds):
        tensors_of(wrapped).sums.are_on = step % 3 == 2
        x = numbers(root, 2 * len(slots), seed=step).requires_grad_()
        for call in (wrapped, twin):
            loss(call(x)).backward()
        if step % 3 == 2:
            assert kept_on_slots(wrapped) == 0
            assert_same(gradients(net), gradients(twin))


subsets = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
operations = st.one_of(
    st.tuples(st.just("backward"), st.booleans(), st.none() | subsets, st.sampled_from([False, False, False, True])),
    st.tuples(st.just("backward"), st.just(False), st.none() | subsets, st.just(False)),
    st.tuples(st.just("forward"), st.booleans()),
    st.tuples(st.just("grad"), subsets),
    st.tuples(st.just("zero"), st.booleans(), st.none() | subsets),
    st.tuples(st.just("direct"), subsets),
    st.tuples(st.just("step")),
)


class Program:
    """Operations on a module and on its twin, in step."""

    def __init__(self, slots: list, root: torch.device) -> None:
        self.slots, self.root = slots, root
        self.net, self.twin = build(root), build(root)
        self.wrapped = with_persistent_replicas(self.net, slots)
        self.outputs: list[tuple[Tensor, Tensor]] = []  # of forwards that have had no backward
        self.calls = 0
        self.were_zeroed = False

    def run(self, operation: tuple) -> None:
        kind, *arguments = operation
        getattr(self, kind)(*arguments)
        if kept_on_slots(self.wrapped) == 0:
            self.compare()

    def compare(self) -> None:
        found, expected = (
            [None if grad is None else grad.detach() for grad in gradients(module)] for module in (self.net, self.twin)
        )
        assert_same(found, expected)

    def both(self) -> tuple[Branched, Branched]:
        return self.net, self.twin

    def forward(self, is_positive: bool = False) -> None:
        """With positive numbers nobody uses the branch."""
        self.calls += 1
        x = numbers(self.root, 2 * len(self.slots), seed=self.calls, positive=is_positive)
        self.outputs.append((loss(self.wrapped(x)), loss(self.twin(x))))
        self.were_zeroed = False

    def backward(self, are_on: bool, names: list[str] | None, create_graph: bool) -> None:
        if not self.outputs:
            self.forward()
        tensors_of(self.wrapped).sums.are_on = are_on
        for value, module in zip(self.outputs.pop(), self.both(), strict=True):
            value.backward(inputs=None if names is None else inputs_of(module, names), create_graph=create_graph)
        if are_on:
            assert kept_on_slots(self.wrapped) == 0

    def grad(self, names: list[str]) -> None:
        before = kept_on_slots(self.wrapped)
        if not self.outputs:
            self.forward()
            before = kept_on_slots(self.wrapped)
        values = self.outputs.pop()
        found, expected = (
            [*torch.autograd.grad(value, inputs_of(module, names), allow_unused=True)]
            for value, module in zip(values, self.both(), strict=True)
        )
        assert_same(found, expected)
        assert kept_on_slots(self.wrapped) == before

    def zero(self, to_none: bool, names: list[str] | None) -> None:
        for module in self.both():
            for name in NAMES if names is None else names:
                parameter = module.get_parameter(name)
                if to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()
        self.were_zeroed |= not to_none

    def direct(self, names: list[str]) -> None:
        """Not after zeros that no forward has seen: a sum on top of them would hide that gradients were thrown away."""
        if self.were_zeroed:
            return
        for module in self.both():
            sum(parameter.square().sum() for parameter in inputs_of(module, names)).backward()

    def step(self) -> None:
        if kept_on_slots(self.wrapped) == 0:
            self.outputs.clear()
            for module in self.both():
                torch.optim.SGD(module.parameters(), lr=1e-3).step()


@pytest.mark.slots(2, long=[3])
@given(program=st.lists(operations, min_size=2, max_size=14))
def test_any_program_equals_one_device_whenever_all_is_summed(slots: list, root: torch.device, program: list) -> None:
    running = Program(slots, root)
    for operation in (*program, ("backward", True, None, False)):
        running.run(operation)
    running.compare()
