"""Errors of a replicated module are raised to the caller, and the step after an error is that of one device.

Errors of the call of `replicate` are in test_replicate, errors while other slots are at work in
test_replicate_errors_meanwhile.
"""

import pytest
import torch
from kept import Branched, assert_same, gradients, kept_on_slots, numbers_of_slots
from loops import SMALL, left_behind, mean_square, wait_for_the_engine, waits
from torch import Tensor

from dataparallel.composable import replicate
from dataparallel.testing.cases import seeded
from dataparallel.testing.steps import assert_equal


class Failing(Branched):
    """Raises on the slot that has the sample with the number ``at`` in its first column."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.at = "", 0.0

    def forward(self, x: Tensor) -> Tensor:
        raises = bool((x[:, 0] == self.at).any())
        if self.fails == "backward":

            def run(gradient: Tensor) -> None:
                if raises:
                    raise ArithmeticError("in backward")

            x = x.detach().requires_grad_()  # it comes last: some gradients have been summed or kept by then
            x.register_hook(run)
        y = super().forward(x)
        if self.fails == "forward" and raises:
            raise ArithmeticError("in forward")
        return y


@pytest.fixture
def twin(root):
    return seeded(Failing)().to(root)


@pytest.fixture
def net(root, slots):
    return replicate(seeded(Failing)().to(root), devices=slots, **SMALL)


def step(module, x: Tensor, quietly: Tensor | None = None) -> list[Tensor | None]:
    """The gradients of one step, after one micro-batch that waits if there is one."""
    module.zero_grad()
    if quietly is not None:
        with waits(module):
            mean_square(module(quietly)).backward()
    mean_square(module(x)).backward()
    return gradients(module)


@pytest.mark.slots(3, long=[2, 8])
@pytest.mark.parametrize("settled", [True, False], ids=["later", "at the first step"])
@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("quietly", [True, False], ids=["in no_sync", "synchronised"])
def test_a_slot_that_raises_leaves_nothing_behind(net, twin, slots, root, quietly, fails, which, settled):
    """This holds for gradients that waited on the slots too, if the caller then throws gradients away."""
    x, y = numbers_of_slots(root, slots), numbers_of_slots(root, slots, seed=1)
    if settled:
        for _ in range(2):
            assert_same(step(net, x, y), step(twin, x, y))
        net.zero_grad()
        twin.zero_grad()
    before = left_behind(net)[0]
    net.fails, net.at = fails, 1.0 if which == "first" else float(len(slots))
    with pytest.raises(ArithmeticError, match=f"in {fails}"), waits(net) if quietly else torch.enable_grad():
        mean_square(net(x)).backward()
    net.fails = ""
    wait_for_the_engine(slots)
    if fails == "forward":
        assert all(parameter.grad is None for parameter in net.parameters())
        assert kept_on_slots(net) == 0
    assert_equal(left_behind(net)[0], before, "values", atol=0)
    for _ in range(3):
        assert_same(step(net, x, y), step(twin, x, y))
        assert kept_on_slots(net) == 0


@pytest.mark.slots(2, 3)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["None", "zeros"])
def test_what_waited_before_the_error_is_thrown_away_with_it(net, twin, slots, root, set_to_none):
    x, y = numbers_of_slots(root, slots), numbers_of_slots(root, slots, seed=1)
    for _ in range(2):
        step(net, x)
    net.zero_grad()
    with waits(net):
        mean_square(net(y)).backward()
        net.fails, net.at = "backward", 1.0
        with pytest.raises(ArithmeticError):
            mean_square(net(x)).backward()
    net.fails = ""
    wait_for_the_engine(slots)
    net.zero_grad(set_to_none=set_to_none)
    mean_square(net(x)).backward()
    step(twin, x)
    if not set_to_none:  # what nobody uses has zeros then
        for parameter in twin.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert_same(gradients(net), gradients(twin))


@pytest.mark.devices("sim", "cuda")
@pytest.mark.parametrize("settled", [True, False], ids=["later", "at the first forward"])
def test_a_parameter_on_another_device(net, twin, slots, root, settled):
    x = numbers_of_slots(root, slots)
    if settled:
        step(net, x)
    for other in {torch.device("cpu"), torch.device(slots[1])} - {root}:
        there = net.second.bias.data
        net.second.bias.data = there.to(other)
        net.zero_grad()
        with pytest.raises(
            RuntimeError,
            match=rf"on device: {other}\. It is parameter 'second\.bias'; call module\.to\('{root}'\)",
        ):
            net(x)
        net.second.bias.data = there
        assert_same(step(net, x), step(twin, x))
