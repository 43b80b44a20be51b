"""`fully_shard` over machines: delays in forward and backward, between slots and machines, change no bit."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from dataparallel.testing.steps import assert_equal
from machine_ranks import on_machines
from sharded_machines import EACH_SPREAD, SPREADS, spread
from sharded_steps import state

pytestmark = [pytest.mark.usefixtures("one_intra_op_thread")]


class Late(torch.autograd.Function):
    """Nothing, after a random time in forward and in backward."""

    longest = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(random.random() * Late.longest)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(random.random() * Late.longest)
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Late.apply(torch.tanh(self.linear(Late.apply(x))))


def trained(rank: int, devices: list[Any], way: str, longest: float, steps: int) -> Any:
    Late.longest = longest
    random.seed(rank)
    torch.manual_seed(0)
    net, where = nn.Sequential(*[Block() for _ in range(4)]).double().to(devices[0]), spread(way)
    for unit in (*net, net):
        fully_shard(unit, devices=devices, **where)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 10 + rank)
        x = torch.randn(4, 6, dtype=torch.float64, generator=generator).to(devices[0])
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        time.sleep(random.random() * longest)
    return state(net)


@EACH_SPREAD
def test_delays_change_nothing(way):
    options: dict[str, Any] = {"ranks": SPREADS[way][0], "slots": 1 if way == "2-D" else 2}
    slow = on_machines(trained, way, 0.004, 20, **options)
    fast = on_machines(trained, way, 0.0, 20, **options)
    for one, other in zip(slow, fast, strict=True):
        assert_equal(one, other, "state", atol=0)
