"""A training of the stress test: a few steps of a model in a form, which changes between steps, beside one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from stress_models import applied, by_chunks, made, same_parameters, samples
from torch import Tensor, nn

from each_form import whole

STEPS = 5


class Training:
    """A training of ``form``, whose changes follow from ``number``. `run` gives the parameters at its end."""

    def __init__(self, form: str, number: int, slots: Sequence[torch.device]) -> None:
        self.form, self.number, self.slots = form, number, slots
        self.key = form, number
        self.names: list[str] = []
        self._choose = random.Random(f"training {number}")

    def run(self) -> list[Tensor]:
        root, number = self.slots[0], self.number
        ours, theirs = (made(number, root, family=number % 4 == 3 and self.form == "DataParallel") for _ in range(2))
        model = applied(self.form, ours, self.slots)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, theirs)]
        for step in range(STEPS):
            x = samples(100 * number + step, 2 * len(self.slots) + number % 3, root)
            self._step(model, x, optimizers[0])
            self._step(partial(by_chunks, theirs, slots=len(self.slots)), x, optimizers[1])
            same_parameters(ours, theirs, f"{self.form}, training {number}, step {step}")
            change = self._choose.choice(["nothing", "scale", "mode", "hook", "gradients", "values", "child"])
            for net in (ours, theirs):
                self._change(change, net, step)
        self.names = [name for name, _ in ours.named_parameters()]
        return [whole(parameter).detach().clone() for parameter in ours.parameters()]

    @staticmethod
    def _step(call: Callable[[Tensor], Tensor], x: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()

    def _change(self, change: str, net: Any, step: int) -> None:
        last = net.last[0] if isinstance(net.last, nn.Sequential) else net.last
        if change == "scale":
            net.scale = 1.0 + 0.1 * step
        elif change == "mode":
            net.train(not net.training)
        elif change == "hook":
            last.register_forward_hook(lambda module, args, output: output * 1.5)
        elif change == "gradients":
            last.bias.requires_grad_(not last.bias.requires_grad)
        elif change == "values" and self.form != "fully_shard":
            net.first.weight.data.mul_(0.9)
        elif change == "child" and self.form != "fully_shard":
            net.last = nn.Sequential(last, nn.Tanh())
