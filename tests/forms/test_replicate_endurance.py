"""Many steps of a replicated module: nothing grows, and a step after an error is that of one device."""

import threading

import psutil
import pytest
import torch
from kept import Branched, assert_same, gradients, numbers
from loops import SMALL, adamw, mean_square, waits
from torch import nn

from dataparallel.composable import replicate
from dataparallel.testing.cases import seeded
from memory import allocated, live_objects

pytestmark = pytest.mark.counts_memory

STEPS = 400


class Fails(Branched):
    """In backward it fails before any gradient is summed, or when the last ones are."""

    fails = ""

    def forward(self, x):
        if self.fails == "end of backward":
            x = x.clone().requires_grad_()
            x.register_hook(self.raises)
        y = super().forward(x)
        if self.fails == "forward":
            raise ArithmeticError("in forward")
        if self.fails == "backward":
            y.register_hook(self.raises)
        return y

    @staticmethod
    def raises(gradient):
        raise ArithmeticError("in backward")


@pytest.mark.long
@pytest.mark.devices("sim", "cuda")
@pytest.mark.parametrize("errors", [False, True], ids=["without errors", "an error in every tenth step"])
def test_many_steps_grow_nothing(slots, root, errors):
    net, twin = seeded(Fails)().to(root), seeded(Fails)().to(root)
    replicate(net, devices=slots, **SMALL)
    optimizers = {net: adamw(net), twin: adamw(twin)}
    x, y = numbers(root, 2 * len(slots)), numbers(root, 2 * len(slots) + 1, seed=1)

    def step(module) -> None:
        optimizers[module].zero_grad()
        with waits(module):
            mean_square(module(y)).backward()
        mean_square(module(x)).backward()

    def failing_step(kind, quietly) -> None:
        net.fails = kind
        with (
            pytest.raises(ArithmeticError, match=r"in (forward|backward)"),
            waits(net) if quietly else torch.enable_grad(),
        ):
            mean_square(net(x)).backward()
        net.fails = ""

    def steps(count) -> None:
        for k in range(count):
            if errors and k % 10 == 9:
                failing_step(("forward", "backward", "end of backward")[k // 10 % 3], k // 30 % 2 == 1)
                step(net)
                optimizers[twin].zero_grad()
                twin.load_state_dict(net.state_dict())
                step(twin)
                assert_same(gradients(net), gradients(twin))
                optimizers[twin].zero_grad()
            else:
                step(net)
            optimizers[net].step()
        optimizers[net].zero_grad()

    steps(60)
    bytes_before, before = allocated(slots), (threading.active_count(), live_objects())
    memory = psutil.Process().memory_info().rss
    steps(300 if errors else STEPS)
    assert allocated(slots) == bytes_before
    assert threading.active_count() <= before[0]
    assert live_objects() <= before[1] + 20
    assert psutil.Process().memory_info().rss <= memory + 8 * 2**20


@pytest.mark.long
def test_a_hundred_modules_one_after_the_other_leave_nothing(slots, root):
    def use() -> None:
        module = replicate(nn.Linear(4, 4).double().to(root), devices=slots)
        for _ in range(2):
            module(numbers(root, 2 * len(slots))).sum().backward()

    for _ in range(5):
        use()
    bytes_before, before = allocated(slots), live_objects()
    for _ in range(100):
        use()
    assert allocated(slots) == bytes_before
    assert live_objects() <= before + 20
