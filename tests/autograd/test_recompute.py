"""Backward leaves the CPU generator as it found it, also where recomputations draw from it."""

from typing import Any

import torch
import torch.utils.checkpoint  # without it nothing has to be restored
from torch import Tensor

from dataparallel.autograd.functions import restore_after_backward


class Restoring(torch.autograd.Function):
    """Its backward appends the CPU generator's state to ``seen``, asks for it to be restored, and draws."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seen: list) -> Tensor:
        ctx.seen = seen
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.seen.append(torch.get_rng_state())
        restore_after_backward()
        torch.rand(3)
        return grad, None


def test_backward_leaves_the_cpu_generator_as_the_first_gather_found_it() -> None:
    source = torch.randn(2, requires_grad=True)
    for _ in range(2):
        seen: list[Tensor] = []
        output = Restoring.apply(Restoring.apply(source, seen), seen)
        torch.rand(5)
        output.sum().backward()
        assert len(seen) == 2
        assert not torch.equal(seen[0], seen[1])
        assert torch.equal(torch.get_rng_state(), seen[0])
