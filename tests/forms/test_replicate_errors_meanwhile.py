"""One slot raises while all others are in the same backward: nothing is left of it, and the next step is right.

The slots meet at a layer. One of them raises there when all others have come, and these wait until it has.
"""

import threading

import pytest
import torch
from kept import assert_same, gradients, loss, numbers_of_slots
from loops import SMALL, wait_for_the_engine, waits
from torch import Tensor, nn

from dataparallel.composable import replicate
from dataparallel.testing.cases import seeded
from memory import allocated

TIMEOUT = 20.0
LAYERS = 4


class Meeting:
    """A place where the slots of one backward meet, after ``layer``. Slot number ``raising`` raises there."""

    def __init__(self, layer: int, slots: int, raising: int) -> None:
        self.layer, self.raising = layer, raising
        self._here, self._raised = threading.Barrier(slots, timeout=TIMEOUT), threading.Event()

    def come(self, number: int) -> None:
        """Called by each slot's backward, with the slot's number."""
        self._here.wait()
        if number == self.raising:
            try:
                raise ArithmeticError("in backward")
            finally:
                self._raised.set()
        assert self._raised.wait(TIMEOUT)


class Layers(nn.Module):
    """A slot's number is the first value of its chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))

    def forward(self, x: Tensor, meeting: Meeting | None = None) -> Tensor:
        number = int(x[0, 0])
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if meeting is not None and place == meeting.layer:
                x.register_hook(lambda gradient: meeting.come(number))
        return x


@pytest.fixture
def twin(root) -> nn.Module:
    return seeded(Layers)().to(root)


@pytest.fixture
def net(root, slots) -> nn.Module:
    return replicate(seeded(Layers)().to(root), devices=slots, **SMALL)


def step(module, x: Tensor) -> list[Tensor | None]:
    module.zero_grad()
    loss(module(x)).backward()
    return gradients(module)


def assert_right_steps(net, twin, x: Tensor) -> None:
    for _ in range(3):
        assert_same(step(net, x), step(twin, x))
    net.zero_grad()
    twin.zero_grad()


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(2, long=[8])
@pytest.mark.parametrize("settled", [True, False], ids=["later", "at the first step"])
@pytest.mark.parametrize("which", ["first", "last"], ids=["first slot", "last slot"])
@pytest.mark.parametrize("layer", [0, LAYERS - 1], ids=["early layer", "late layer"])
@pytest.mark.parametrize("quietly", [True, False], ids=["in no_sync", "synchronised"])
def test_in_backward(net, twin, slots, root, layer, which, settled, quietly) -> None:
    """The engine has a thread for each device. Each ``.grad`` is unchanged, or has all gradients of the pass."""
    if len({*slots}) < len(slots):
        pytest.skip("slots on one device run one after the other")
    x = numbers_of_slots(root, slots)
    if settled:
        assert_right_steps(net, twin, x)
    whole = step(twin, x[:2] if quietly else x)  # in no_sync what slot 0 has found
    twin.zero_grad()
    before = allocated(slots) if settled else []
    meeting = Meeting(layer, len(slots), 1 if which == "first" else len(slots))
    with pytest.raises(ArithmeticError, match="in backward"), waits(net) if quietly else torch.enable_grad():
        loss(net(x, meeting)).backward()
    wait_for_the_engine(slots)
    for (name, parameter), expected in zip(net.named_parameters(), whole, strict=True):
        if parameter.grad is not None:
            assert int(name.split(".")[1]) > layer
            torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-9)
    assert_right_steps(net, twin, x)
    if before:
        assert allocated(slots, before) == before
