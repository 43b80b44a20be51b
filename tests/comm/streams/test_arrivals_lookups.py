"""Every way to a parameter of a replica waits for its copy; what is read past the registry is there before the start.

Clocks tell what a stream has waited for: to touch memory too early is a race.
"""

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.comm.streams.current import streams_set
from late_parameters import ARRANGEMENTS, WIDTH, Net, arranged, other_stream, samples, silently, steps

pytestmark = [
    pytest.mark.devices("sim", "stand-in"),
    pytest.mark.apart,
    pytest.mark.usefixtures("no_compiler"),
]


@pytest.fixture(params=[*ARRANGEMENTS])
def slots(request: pytest.FixtureRequest) -> list:
    return arranged(request.param)


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return samples(root)


def use(values: Any) -> None:
    """Computes with tensors."""
    for value in values:
        if value is not None:
            (value.detach() * 2).sum()


def on_two_streams(net: nn.Module) -> None:
    """The second stream has waited for nothing but the work before the lookups."""
    device = silently(net.first, "bias").device
    here, other = torch.accelerator.current_stream(device), other_stream(device, 0)
    other.wait_stream(here)
    use([net.last.weight])
    with streams_set({device: other}):
        use([net.last.weight, net.last.bias])
    here.wait_stream(other)


def swapped(net: nn.Module) -> None:
    new = {name: value.detach() * 2 for name, value in net.last.named_parameters()}
    torch.func.functional_call(net.last, new, torch.zeros(1, WIDTH, dtype=torch.float64, device=new["bias"].device))
    use([net.last.weight])


def replaced(net: nn.Module) -> None:
    net.last.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64, device=net.first.bias.device))
    use([net.last.weight])


def deleted(net: nn.Module) -> None:
    weight = silently(net.second, "weight").detach()
    del net.second.weight
    torch.empty_like(weight).fill_(1)
    net.second.register_parameter("weight", nn.Parameter(torch.ones_like(weight)))
    use([net.second.weight])


def looked_up_in_a_thread(net: nn.Module) -> None:
    thread = threading.Thread(target=lambda: use([net.last.weight, net.last.bias]))
    thread.start()
    thread.join()


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "an attribute": lambda net: use([net.last.weight]),
    "an item": lambda net: use([net.last._parameters["weight"]]),
    "items": lambda net: use(value for _, value in net.last._parameters.items()),
    "values": lambda net: use(net.last._parameters.values()),
    "iteration": lambda net: use(dict.__getitem__(net.last._parameters, name) for name in net.last._parameters),
    "get": lambda net: use([net.last._parameters.get("weight"), net.last._parameters.get("nothing")]),
    "pop": lambda net: use([net.last._parameters.setdefault("weight", net.last._parameters.pop("weight"))]),
    "popitem": lambda net: use([net.last._parameters.setdefault(*net.last._parameters.popitem())]),
    "copy": lambda net: use(net.last._parameters.copy().values()),
    "copy.copy": lambda net: use(copy.copy(net.last._parameters).values()),
    "deepcopy": lambda net: use(copy.deepcopy(net.constant._parameters).values()),
    "a pickle": lambda net: use(pickle.loads(pickle.dumps(net.last._parameters)).values()),
    "dict": lambda net: use(dict(net.last._parameters).values()),
    "a union": lambda net: use((net.last._parameters | {}).values()),
    "update": lambda net: use(_updated(net.last._parameters).values()),
    "equality": lambda net: net.scale._parameters == {"value": torch.ones_like(silently(net.scale, "value"))},
    "parameters": lambda net: use(net.parameters()),
    "named_parameters": lambda net: use(value for _, value in net.named_parameters()),
    "state_dict": lambda net: use(net.state_dict().values()),
    "deepcopy of a module": lambda net: use(copy.deepcopy(net.constant).parameters()),
    "functional_call": swapped,
    "replaced": replaced,
    "deleted": deleted,
    "two streams": on_two_streams,
    "a thread": looked_up_in_a_thread,
}


def _updated(registry: dict) -> dict:
    new: dict = {}
    new.update(registry)
    return new


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_parameter_waits_for_it(
    way: str, slots: list, root: torch.device, x: Tensor, form: Callable
) -> None:
    model = Net().double().to(root)
    call = form(model, slots)
    steps(model, call, x)
    model.does = WAYS[way]
    # Copying a parameter of a replica is refused where it is no leaf.
    refused = pytest.raises(RuntimeError, match="cannot deepcopy") if "deepcopy" in way else nullcontext()
    for _ in range(2):
        with torch.no_grad(), nullcontext() if isinstance(call, DataParallel) else refused:
            call(x)
    with refused:
        call(x).sum().backward()


class Odd(nn.Module):
    """Reads parameters past the registry."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.script = torch.jit.script(nn.Linear(WIDTH, WIDTH))
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.old = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.list = nn.ParameterList([torch.ones(WIDTH) for _ in range(2)])
        self.dict = nn.ParameterDict({"a": torch.ones(WIDTH)})
        self.tail = nn.Linear(WIDTH, WIDTH)
        self.held = [self.tail.weight]
        self.function = lambda x: x * held_bias
        held_bias = self.tail.bias
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.tail.weight
        self.register_buffer("shift", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(x) @ self.held[0] + self.shift
        x = self.rnn(x[:, None])[0][:, 0]
        x = self.old(self.linear(self.script(x))) * self.dict["a"]
        for scale in self.list:
            x = x * scale
        return self.tied(self.tail(self.tail(x)))


@pytest.mark.filterwarnings("ignore")
def test_what_is_read_past_the_registry_is_there_before_the_replica_starts(
    slots: list, root: torch.device, x: Tensor, form: Callable
) -> None:
    model, twin = Odd().double().to(root), Odd().double().to(root)
    model.held, twin.held = [model.tail.weight], [twin.tail.weight]
    twin.load_state_dict(model.state_dict())
    call = form(model, slots)
    for _ in range(3):
        steps(model, call, x, 1)
        steps(twin, twin, x, 1)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            torch.testing.assert_close(call(x), twin(x), rtol=1e-9, atol=1e-9)
