"""A module whose replicas do what a test asks for, for tests of what calls use again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# They are no attributes of the module: a changed tree would have other replicas.
DOES: list[Callable[[Any], Any]] = []
"""Called with each replica at the end of its forward."""
HOLDS: list[Callable[[Any], Any]] = []
"""As `DOES`, but what they return is kept in `HELD`."""
HELD: list[Any] = []


class Net(nn.Module):
    """Square weights, one of which takes no gradient and one is complex, and buffers; otherwise in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.fixed = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.register_buffer("none", torch.empty(0))
        self.scale = 2.0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.linear(x)) @ self.fixed * self.phase.abs() * self.scale + self.shift + self.training
        for does in DOES:
            does(self)
        for hold in HOLDS:
            HELD.append(hold(self))
        return y


def build(root: torch.device, kind: type[Net] = Net) -> Net:
    """The same values each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().to(root)


def samples(root: torch.device, count: int = 7) -> Tensor:
    """What a net takes."""
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(root)


def forget() -> None:
    """Ends what tests have asked for, and frees what is held."""
    DOES.clear()
    HOLDS.clear()
    HELD.clear()


def on_one_device(net: nn.Module, x: Tensor) -> Tensor:
    """What the module returns if nothing is asked of it."""
    does, DOES[:] = [*DOES], []
    with torch.no_grad():
        expected = net(x)
    DOES[:] = does
    return expected
