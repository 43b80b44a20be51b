"""Clipping, scaling and torch's optimizers on parameters that `fully_shard` has spread over machines."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.composable import fully_shard
from dataparallel.testing.steps import assert_equal
from machine_ranks import on_machines
from sharded_machines import SPREADS, spread
from sharded_steps import on_device

pytestmark = [pytest.mark.usefixtures("one_intra_op_thread")]

STEPS = 4


class Net(nn.Module):
    """Weights of uneven parts, one with fewer rows than there are owners, and a 0-dim one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 7), nn.Linear(7, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


def samples(step: int) -> Tensor:
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, parts: int, part: int, device: Any, name: str, what: str
) -> tuple[dict[str, Tensor], list[float]]:
    """The values after some steps, and norms or scales. Each machine takes a part of the samples."""
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=4.0, growth_interval=2, enabled=what == "scale")
    seen = []
    for step in range(STEPS):
        x = samples(step).chunk(parts)[part].to(device)
        scaler.scale(model(x).square().sum()).backward()
        if what == "norm":
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=step % 2 == 0)))
        if what == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
        if what == "scale" and step == 1:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(float(scaler.get_scale()))
    return dict(fully_shard.full_state_dict(model)), seen


def spoil(model: Any) -> None:
    """Makes the last row of a gradient infinite: one owner has it."""
    gradient = model.first.weight.grad
    mask = torch.zeros(7, 1, dtype=torch.bool, device=gradient.device)
    mask[6] = True
    with torch.no_grad():
        gradient.masked_fill_(mask, float("inf"))


def on_rank(rank: int, devices: list, way: str, name: str, what: str) -> Any:
    parts = torch.distributed.get_world_size()
    model = fully_shard(on_device(net, devices[0]), devices=devices, **spread(way))
    return train(model, parts, rank, devices[0], name, what)


@pytest.mark.parametrize("what", ["norm", "value", "scale"])
@pytest.mark.parametrize(
    ("way", "name"), [("1-D", "AdamW"), ("1-D", "AdamW, one by one"), ("hybrid", "AdamW"), ("2-D", "momentum")]
)
def test_steps_equal_one_device(way: str, name: str, what: str) -> None:
    ranks = SPREADS[way][0]

    class Mean(Net):
        """The loss of one device is the mean over machines."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / ranks**0.5

    torch.manual_seed(0)
    expected, wanted = train(Mean().double(), 1, 0, "cpu", name, what)
    for values, seen in on_machines(on_rank, way, name, what, ranks=ranks, slots=1 if ranks > 2 else 2):
        assert_equal(values, expected, "values", atol=1e-9)
        assert seen == pytest.approx(wanted, abs=1e-9)
