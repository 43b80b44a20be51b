"""Passes that write only some gradients, ``backward(inputs=...)``, mixed with others, end as on one device."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept import Branched, assert_same, loss, numbers
from loops import assert_same_loop, mean_square, waits
from torch import Tensor, nn

from dataparallel.testing.cases import seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
]

NAMES = [name for name, _ in Branched().named_parameters()]


@pytest.fixture
def learnt(both: Any) -> Any:
    both.learn()
    return both


@pytest.mark.parametrize("are_on", [True, False])
def test_a_recorded_pass_loses_nothing(learnt: Any, are_on: bool) -> None:
    """It puts another tensor in the place of ``.grad``."""
    learnt.backward(learnt.x(1), False)
    learnt.backward(learnt.x(2), are_on, create_graph=True)
    assert learnt.kept() == 0
    learnt.compare()
    learnt.sums_are(True)
    for module in learnt.modules:
        penalty = sum(parameter.grad.square().sum() for parameter in module.parameters())
        for parameter in module.parameters():
            parameter.grad = None
        penalty.backward()
    learnt.compare()


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


def test_a_question_that_goes_through_a_computed_buffer_takes_nothing(both_of: Callable) -> None:
    both = both_of(lambda root: seeded(Computed)().to(root))
    both.net.squared = both.net.scale.square()
    for are_on in (True, True, False):
        both.sums_are(are_on)
        loss(both.wrapped(both.x())).backward(inputs=[both.net.linear.weight], retain_graph=True)
    both.sums_are(True)
    before = both.kept()
    torch.autograd.grad(loss(both.wrapped(both.x())), [both.net.scale])
    assert both.kept() == before > 0


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

    def __init__(self, both: Any) -> None:
        self.both = both
        self.outputs: list[list[Tensor]] = []  # of forwards that have had no backward
        self.number_of_calls = 0
        self.were_zeroed = False

    def run(self, operation: tuple) -> None:
        kind, *arguments = operation
        getattr(self, kind)(*arguments)
        if self.both.kept() == 0:
            self.both.compare()

    def forward(self, is_positive: bool = False) -> None:
        """With positive numbers nobody uses the branch."""
        self.number_of_calls += 1
        x = numbers(self.both.root, 2 * len(self.both.slots), seed=self.number_of_calls, positive=is_positive)
        self.outputs.append([loss(call(x)) for call, _ in self.both.calls])
        self.were_zeroed = False

    def backward(self, are_on: bool, names: list[str] | None, create_graph: bool) -> None:
        if not self.outputs:
            self.forward()
        self.both.sums_are(are_on)
        for value, module in zip(self.outputs.pop(), self.both.modules, strict=True):
            value.backward(inputs=self.both.inputs_of(module, names), create_graph=create_graph)
        if are_on:
            assert self.both.kept() == 0

    def grad(self, names: list[str]) -> None:
        if not self.outputs:
            self.forward()
        before = self.both.kept()
        values = self.outputs.pop()
        found, expected = (
            [*torch.autograd.grad(value, self.both.inputs_of(module, names), allow_unused=True)]
            for value, module in zip(values, self.both.modules, strict=True)
        )
        assert_same(found, expected)
        assert self.both.kept() == before

    def zero(self, to_none: bool, names: list[str] | None) -> None:
        for module in self.both.modules:
            for parameter in self.both.inputs_of(module, NAMES if names is None else names):
                if to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()
        self.were_zeroed |= not to_none

    def direct(self, names: list[str]) -> None:
        """Not after zeros that no forward has seen: a sum on top of them would hide that gradients were thrown away."""
        if self.were_zeroed:
            return
        for module in self.both.modules:
            sum(parameter.square().sum() for parameter in self.both.inputs_of(module, names)).backward()

    def step(self) -> None:
        if self.both.kept() == 0:
            self.outputs.clear()
            for module in self.both.modules:
                torch.optim.SGD(module.parameters(), lr=1e-3).step()


@pytest.mark.slots(2, long=[3])
@given(program=st.lists(operations, min_size=2, max_size=14))
def test_any_program_equals_one_device_whenever_all_is_summed(both_of: Callable, program: list) -> None:
    running = Program(both_of())
    for operation in (*program, ("backward", True, None, False)):
        running.run(operation)
    running.both.compare()
