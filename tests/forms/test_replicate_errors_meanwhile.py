"""One slot raises while all others are in the same pass: nothing is left of the pass, and the next step is right.

The slots of a pass meet at a layer, in forward or in backward: one of them raises there when all others have come, and
these wait until it has.
"""

import threading
import weakref
from typing import Any

import pytest
import torch
from kept import assert_same, gradients, kept_on_slots, loss, numbers, numbers_of_slots
from loops import SMALL, left_behind, wait_for_the_engine, waits
from torch import Tensor, nn

from dataparallel.composable import replicate
from dataparallel.testing.cases import seeded
from dataparallel.testing.steps import assert_equal
from memory import allocated, soon

TIMEOUT = 20.0
LAYERS = 4

at_layers = pytest.mark.parametrize("layer", [0, LAYERS - 1], ids=["early layer", "late layer"])
by_slots = pytest.mark.parametrize("which", ["first", "last"], ids=["first slot", "last slot"])
when_known = pytest.mark.parametrize("settled", [True, False], ids=["later", "at the first step"])
quietly_or_not = pytest.mark.parametrize("quietly", [True, False], ids=["in no_sync", "synchronised"])


class Meeting:
    """A place where the slots of one pass meet: after ``layer``, in ``stage``. Slot number ``raising`` raises there."""

    def __init__(self, slots: list, stage: str, layer: int, which: str) -> None:
        self.stage, self.layer, self.others = stage, layer, len(slots) - 1
        self.raising = 1 if which == "first" else len(slots)
        self.made: list[weakref.ref[Tensor]] = []
        self._here, self._raised, self._ended = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    def come(self, number: int) -> None:
        """Called by each slot's replica, with the slot's number."""
        if number == self.raising:
            for _ in range(self.others):
                assert self._here.acquire(timeout=TIMEOUT)
            try:
                raise ArithmeticError(f"in {self.stage}")
            finally:
                self._raised.set()
        self._here.release()
        assert self._raised.wait(TIMEOUT)

    def leave(self) -> None:
        """Called by each slot that does not raise, when it leaves the place."""
        self._ended.release()

    def have_others_ended(self, timeout: float = 0) -> bool:
        """True if all slots but the one that raises leave within ``timeout`` seconds."""
        return all([self._ended.acquire(timeout=timeout) for _ in range(self.others)])


class Meet(torch.autograd.Function):
    """The place to meet in backward; otherwise the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: Meeting, number: int) -> Tensor:
        ctx.meeting, ctx.number = meeting, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.meeting.come(ctx.number)
        passed_on = gradient * 1
        ctx.meeting.leave()
        return passed_on, None, None


class Layers(nn.Module):
    """A slot's number is the first value of its chunk. Replicas keep their last activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))

    def forward(self, x: Tensor, meeting: Meeting | None = None) -> Tensor:
        if meeting is None:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x
        number = int(x[0, 0])
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            meeting.made.append(weakref.ref(x))
            self.last = x
            if place == meeting.layer and meeting.stage == "forward":
                meeting.come(number)
            elif place == meeting.layer:
                x = Meet.apply(x, meeting, number)
        if meeting.stage == "forward":
            meeting.leave()
        return x


@pytest.fixture
def twin(root) -> nn.Module:
    return seeded(Layers)().to(root)


@pytest.fixture
def net(root, slots) -> nn.Module:
    return replicate(seeded(Layers)().to(root), devices=slots, **SMALL)


@pytest.fixture
def together(slots) -> None:
    """Replicas run at the same time while gradients are recorded, and so do their backward passes."""
    if len({*slots}) < len(slots):
        pytest.skip("slots on one device run one after the other")


def step(module, x: Tensor) -> list[Tensor | None]:
    module.zero_grad()
    loss(module(x)).backward()
    return gradients(module)


def settle(net, twin, x: Tensor) -> None:
    """Steps in which the order of gradients is learnt."""
    for _ in range(2):
        assert_same(step(net, x), step(twin, x))
    net.zero_grad()
    twin.zero_grad()


def bytes_of(slots, settled=None) -> list[int]:
    """Bytes on each device that counts them."""
    return allocated(sorted({torch.device(slot) for slot in slots}, key=str), settled)


def assert_next_steps(net, twin, x: Tensor, slots, before: list[int]) -> None:
    """Asserts that they are those of one device, and that the bytes ``before``, if any, are in use afterwards."""
    for _ in range(3):
        assert_same(step(net, x), step(twin, x))
        assert kept_on_slots(net) == 0
    net.zero_grad()
    twin.zero_grad()
    if before:
        assert bytes_of(slots, before) == before


@pytest.mark.slots(2, long=[8])
@pytest.mark.parametrize("record", [True, False], ids=["recorded", "without a graph"])
@when_known
@by_slots
@at_layers
def test_in_forward(net, twin, slots, root, layer, which, settled, record, request) -> None:
    """Gradients do not change, and those that wait on the slots do not either."""
    if record:
        request.getfixturevalue("together")
    else:
        net.eval()
    x = numbers_of_slots(root, slots)
    y = numbers(root, 4 * len(slots), seed=1)  # of another size, so that its call is none of those that tell permits
    if settled:
        settle(net, twin, x)
    with waits(net):
        loss(net(y)).backward()
    values, waiting, kept = *left_behind(net), kept_on_slots(net)
    addresses = [parameter.grad.data_ptr() for parameter in net.parameters()]
    before = bytes_of(slots) if settled else []
    meeting = Meeting(slots, "forward", layer, which)
    with torch.set_grad_enabled(record):
        with pytest.raises(ArithmeticError, match="in forward"):
            net(x, meeting)
        assert meeting.have_others_ended()
    assert soon(lambda: not any(made() is not None for made in meeting.made))
    assert_equal(left_behind(net)[0], values, "values", atol=0)
    if settled:  # else buckets are made anew, and what has waited is summed before
        assert_equal(left_behind(net)[1], waiting, "gradients", atol=0)
        assert [parameter.grad.data_ptr() for parameter in net.parameters()] == addresses
        assert kept_on_slots(net) == kept > 0
    if before:
        assert bytes_of(slots, before) == before
    loss(net(x)).backward()
    for samples in (y, x):
        loss(twin(samples)).backward()
    assert_same(gradients(net), gradients(twin))
    assert_next_steps(net, twin, x, slots, [])


@pytest.mark.devices("sim", "cuda")
@pytest.mark.usefixtures("together")
@pytest.mark.slots(2, long=[8])
@when_known
@by_slots
@at_layers
@quietly_or_not
def test_in_backward(net, twin, slots, root, layer, which, settled, quietly) -> None:
    """The engine has a thread for each device. Each ``.grad`` is unchanged, or has all gradients of the pass."""
    x = numbers_of_slots(root, slots)
    if settled:
        settle(net, twin, x)
    whole = step(twin, x[:2] if quietly else x)  # in no_sync what slot 0 has found
    twin.zero_grad()
    values = left_behind(net)[0]
    before = bytes_of(slots) if settled else []
    meeting = Meeting(slots, "backward", layer, which)
    with pytest.raises(ArithmeticError, match="in backward"), waits(net) if quietly else torch.enable_grad():
        loss(net(x, meeting)).backward()
    assert meeting.have_others_ended(TIMEOUT)
    wait_for_the_engine(slots)
    assert_equal(left_behind(net)[0], values, "values", atol=0)
    for (name, parameter), expected in zip(net.named_parameters(), whole, strict=True):
        reached = int(name.split(".")[1]) > layer
        if parameter.grad is not None:
            assert reached
            torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-9)
    net.zero_grad()
    if before and not quietly:
        assert bytes_of(slots, before) == before
    assert_next_steps(net, twin, x, slots, before)
