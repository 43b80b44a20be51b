"""Parameters of awkward shapes, whole and divided, torch's optimizers, and steps with given gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, ShardedTensor
from sharding import full, sharded

STEPS = 5
# Uneven, with empty parts, of one row, 0-dim, and divided along the second dimension.
SHAPES = [(8, 3), (5, 4), (2, 3), (1,), (), (4, 7), (6, 2)]
PLACEMENTS = [Shard(0), Shard(0), Shard(0), Shard(0), Shard(0), Shard(1), Replicate()]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.1, **k),
    "momentum": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **k),
    "nesterov": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k),
    "amsgrad": lambda p, **k: torch.optim.AdamW(p, lr=0.1, amsgrad=True, maximize=True, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.1, **k),
    "centered": lambda p, **k: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9, **k),
    "NAdam": lambda p, **k: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True, **k),
    "RAdam": lambda p, **k: torch.optim.RAdam(p, lr=0.1, weight_decay=0.1, **k),
    "Adadelta": lambda p, **k: torch.optim.Adadelta(p, lr=0.1, weight_decay=0.1, **k),
    "Adamax": lambda p, **k: torch.optim.Adamax(p, lr=0.1, weight_decay=0.1, **k),
    "ASGD": lambda p, **k: torch.optim.ASGD(p, lr=0.1, t0=2, weight_decay=0.1, **k),
}
FUSED = ["SGD", "momentum", "nesterov", "Adam", "AdamW", "amsgrad", "Adagrad"]


def whole_parameters(device: Any = "cpu") -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(device)) for shape in SHAPES]


def divided(parameters: Sequence[Tensor], slots: Sequence[Any]) -> list[nn.Parameter]:
    return [
        nn.Parameter(sharded(parameter, slots, placement, requires_grad=False))
        for parameter, placement in zip(parameters, PLACEMENTS, strict=True)
    ]


def gradients(step: int) -> list[Tensor]:
    torch.manual_seed(100 + step)
    return [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]


def set_gradients(parameters: Sequence[Tensor], step: int) -> None:
    """The gradients of a step, divided as the parameters are."""
    for parameter, gradient in zip(parameters, gradients(step), strict=True):
        if isinstance(parameter, ShardedTensor):
            parameter.grad = sharded(gradient, parameter.devices, parameter.placement)
        else:
            parameter.grad = gradient.to(parameter.device)


def trained(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    for step in range(STEPS):
        set_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [full(parameter) for parameter in parameters]


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other.detach().cpu(), rtol=tolerance, atol=tolerance)


def assert_state_is_divided(parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Every state of a parameter's shape has its owners and placement."""
    for parameter in parameters:
        assert isinstance(parameter, ShardedTensor)
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.dim() > 0:
                assert isinstance(value, ShardedTensor), name
                assert (value.devices, value.placement) == (parameter.devices, parameter.placement)
                assert [shard.device for shard in value.shards] == [shard.device for shard in parameter.shards]


OF_WHOLE_MATRICES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Rprop": lambda p, **k: torch.optim.Rprop(p, lr=0.1, **k),
    "Adafactor": lambda p, **k: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1, **k),
    "Adafactor, foreach": lambda p, **k: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1, foreach=True, **k),
    "Muon": lambda p, **k: torch.optim.Muon(p, lr=0.1, **k),
    "Muon, weights": lambda p, **k: torch.optim.Muon(p, lr=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw", **k),
    "LBFGS": lambda p, **k: torch.optim.LBFGS(p, lr=0.1, max_iter=4, **k),
    "LBFGS, line search": lambda p, **k: torch.optim.LBFGS(p, lr=0.1, max_iter=4, line_search_fn="strong_wolfe", **k),
}


def trained_by_closure(parameters: list[nn.Parameter], name: str) -> list[Tensor]:
    """All parameters that the optimizer takes, after some steps on squares of their distance to given values."""
    taken = [p for p in parameters if p.dim() == 2 or not name.startswith("Muon")]
    optimizer = OF_WHOLE_MATRICES[name](taken)
    for step in range(STEPS):

        def loss(step: int = step) -> Tensor:
            set_gradients(parameters, step)
            for p in taken:
                p.grad.add_(p.detach(), alpha=0.5)  # type: ignore[union-attr]
            return sum((p.detach().square().sum() for p in taken), torch.zeros(()))  # type: ignore[return-value]

        optimizer.step(loss)
    return [full(parameter) for parameter in parameters]
