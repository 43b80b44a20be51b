"""What tests of parameters that travel while replicas compute share: slots, a model, and ways past its lookups."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from spare_streams import spare_stream

WIDTH = 8
ARRANGEMENTS = {"distinct": [0, 1, 2], "duplicates": [0, 1, 0, 1]}


def arranged(arrangement: str) -> list:
    """The slots of one of the `ARRANGEMENTS`."""
    return [torch.device(index) for index in ARRANGEMENTS[arrangement]]


def samples(root: torch.device) -> Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(root)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class Net(nn.Module):
    """Three layers. ``does`` is called in each replica's forward: with the replica, between the layers."""

    def __init__(self, does: Callable[[nn.Module], object] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale, self.constant = Scale(), Scale().requires_grad_(False)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if self.does is not None:
            self.does(self)
        return self.scale(self.last(self.second(x).tanh()))


def copy_of(model: nn.Module) -> nn.Module:
    twin = Net().double().to(model.first.weight.device)
    twin.load_state_dict(model.state_dict())
    return twin


def trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def steps(model: nn.Module, call: nn.Module, x: Tensor, count: int = 3) -> None:
    """Training steps, so that kept replicas know the order of gradients and are refreshed."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(count):
        optimizer.zero_grad()
        call(x).square().sum().backward()
        optimizer.step()


def silently(module: nn.Module, name: str) -> Tensor:
    """A parameter of a replica, without waiting for it."""
    return dict.__getitem__(module._parameters, name)


_others: dict[tuple[torch.device, int], torch.Stream] = {}
_making = threading.Lock()  # replicas ask at the same time


def other_stream(device: torch.device, number: int) -> torch.Stream:
    """A stream of the test. Each is made once."""
    with _making:
        if (device, number) not in _others:
            here = [stream for (at, _), stream in _others.items() if at == device]
            _others[device, number] = spare_stream(device, *here)
        return _others[device, number]
