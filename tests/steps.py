"""What tests on the caller's streams share: models in double precision, a batch, and the gradients of a step."""

from typing import Any

import torch
from torch import Tensor, nn


def build(root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double().to(root)


def numbers(root: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(13, 6, dtype=torch.float64, generator=generator).to(root).requires_grad_()


def gradients(loss: Tensor, model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x, *model.parameters()]))


class Cube(torch.autograd.Function):
    """Its recorded backward still has work to do on the device when the gradient of its gradient is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x * 3 * x)


class Cubes(nn.Module):
    """The input times its parameter, and the cube of that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x * self.weight)
