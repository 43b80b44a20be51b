"""Gathers are launched once for all slots. What arrives too early is limited, and never kept."""

import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clocked import counted
from dataparallel.call.parallel_apply import SERIAL_VARIABLE
from dataparallel.composable import fully_shard
from dataparallel.sharded.units import joint_gathers
from dataparallel.sharded.units.shards import PullSource
from made_units import recorded_gathers, without_joint_gathers

pytestmark = pytest.mark.devices("sim", "stand-in")

WIDTH = 13


THREADS: set[int] = set()  # in which a forward has run


class Blocks(nn.Module):
    """Small units, which run ``times`` times each. The root has a parameter too."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 29), nn.Linear(29, WIDTH)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.times = times
        self.fails = False
        self.skips: dict[torch.device, int] = {}  # a block for each device

    def forward(self, x: Tensor) -> Tensor:
        THREADS.add(threading.get_ident())
        for number, block in enumerate(self.blocks):
            for _ in range(0 if self.skips.get(x.device) == number else self.times):
                x = torch.tanh(block(x))
        if self.fails:
            raise ArithmeticError("in forward")
        return x * self.scale


def make(slots: list[Any], times: int = 1, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Blocks(times).to(slots[0])
    for block in model.blocks:
        fully_shard(block, devices=slots)
    return fully_shard(model, devices=slots, **options)


def units(model: Any) -> list[Any]:
    return [fully_shard.state(module).unit for module in (model, *model.blocks)]


def bytes_waiting(model: Any) -> int:
    """The bytes that wait at slots."""
    (budget,) = {unit.binding.gather_budget for unit in units(model)}
    return budget._used


def rows(slots: list[Any]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * len(slots), WIDTH, generator=generator).to(slots[0])


def steps(model: Any, slots: list[Any], number: int = 2) -> list[Tensor]:
    """The parameters after a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(number):
        optimizer.zero_grad()
        model(rows(slots)).square().mean().backward()
        optimizer.step()
    return [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[PullSource]:
    """The sources from which pieces have been pulled: one for each gather of a unit."""
    return recorded_gathers(monkeypatch, jointly=True)


@pytest.mark.slots(4, long=[3, 8])
def test_one_gather_is_for_all_slots(slots, gathers):
    model = make(slots)
    loss = model(rows(slots)).square().mean()
    assert len(gathers) == 4
    loss.backward()
    assert len(gathers) == 4 + 3  # the root keeps its parameters until backward
    assert bytes_waiting(model) == 0


@pytest.mark.slots(4)
def test_a_step_sends_what_slots_receive_once(slots):
    """A unit's parts go to one slot, and the whole goes to the others."""
    model = make(slots)
    with torch.no_grad():
        model(rows(slots))
        with counted() as counts:
            model(rows(slots))
    copied = sum(number for (origin, target), number in counts.copied.items() if origin != target)
    parameters = sum(unit.full_bytes for unit in units(model))
    batch = 2 * rows(slots).nbytes  # scattered and gathered
    assert copied <= parameters * len(slots) + batch


def may_run(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets so many slots run at a time, at most."""
    room = sys.modules["dataparallel.call.parallel_apply"]
    monkeypatch.setattr(room, "_permits_and_groups", lambda *args: (number, None))


@pytest.fixture(params=[1, 4])
def permits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many slots may run at a time, at most."""
    may_run(request.param, monkeypatch)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit waits at a slot, however small it is. Whoever is not woken hangs."""
    monkeypatch.setattr(joint_gathers, "_MAY_HAVE_ARRIVED", 0)
    monkeypatch.setattr(joint_gathers, "_PATIENCE", 30.0)


@pytest.fixture(params=[2**22, 0], ids=["collected", "exchanged"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot collects the pieces, or slots exchange what they have."""
    monkeypatch.setattr(joint_gathers, "_COLLECTED", request.param)


@pytest.mark.slots(4, long=[3, 5, 8])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("room", [0, 6000, 2**20])
@pytest.mark.usefixtures("way")
def test_has_the_bits_of_gathers_by_each_slot(times, room, slots, monkeypatch):
    """Also where a slot needs a unit again before others have needed it, and where there is not room for all."""
    monkeypatch.setattr(joint_gathers, "_MAY_HAVE_ARRIVED", room)
    model = make(slots, times)
    found = steps(model, slots)
    assert bytes_waiting(model) == 0
    without_joint_gathers(monkeypatch)
    expected = steps(make(slots, times), slots)
    assert all(map(torch.equal, found, expected))


@pytest.mark.slots(4)
@pytest.mark.usefixtures("way", "permits", "no_room")
def test_without_room_slots_wait_for_those_that_are_behind(slots, gathers, monkeypatch):
    """Also if one runs at a time. So there is one gather for all, and one unit waits at a slot."""
    most = 0
    take = joint_gathers.GatherBudget.reserve

    def noted(self: Any, *args: Any) -> bool:
        nonlocal most
        found = take(self, *args)
        most = max(most, len(self._gathers))
        return found

    monkeypatch.setattr(joint_gathers.GatherBudget, "reserve", noted)
    model = make(slots)
    for number in range(1, 4):
        with torch.no_grad():
            model(rows(slots))
        assert len(gathers) == 4 * number
    assert most == 1


@pytest.mark.slots(4)
def test_slots_that_nobody_lets_on_pull_by_themselves(slots, gathers, monkeypatch):
    """The others do not come: one replica runs after the other, each in the turn of the one before."""
    may_run(1, monkeypatch)
    monkeypatch.setattr(joint_gathers, "_MAY_HAVE_ARRIVED", 0)
    monkeypatch.setattr(joint_gathers.GatherBudget, "wait_for_release", lambda self, *args: None)
    with torch.no_grad():
        make(slots)(rows(slots))
    assert len(gathers) > 4


@pytest.mark.slots(4)
@pytest.mark.parametrize("by_environment", [True, False])
@pytest.mark.usefixtures("no_room")
def test_slots_that_run_in_one_thread_wait_for_nobody(by_environment, slots, monkeypatch):
    """The others cannot come, and no thread is started for them."""
    if by_environment:
        monkeypatch.setenv(SERIAL_VARIABLE, "1")
    model = make(slots) if by_environment else make(slots, serial=True)
    THREADS.clear()
    with torch.no_grad():
        model(rows(slots))
    assert {threading.get_ident()} == THREADS


@pytest.mark.slots(4)
@pytest.mark.usefixtures("permits", "no_room")
def test_a_slot_that_passes_a_unit_by_holds_up_nobody(slots):
    model = make(slots)
    expected = steps(make(slots), slots, 1)
    for skipped in range(3):
        model.skips = {torch.device(slots[1]): skipped}
        with torch.no_grad():
            model(rows(slots))
        assert bytes_waiting(model) == 0
        assert not units(model)[0].binding.gather_budget._has_given_up
    model.skips = {}
    assert all(map(torch.equal, steps(model, slots, 1), expected))


@pytest.mark.slots(4)
@pytest.mark.usefixtures("permits", "no_room")
def test_a_slot_that_waits_drops_what_arrives_for_a_unit_that_it_has_passed_by(slots, monkeypatch):
    """Otherwise nobody gets room any more. Here it waits when the gather is launched."""
    launch = joint_gathers.JointGathers._launch_reserved

    def slowly(self: Any, ready: Any) -> None:
        time.sleep(0.02)
        launch(self, ready)

    monkeypatch.setattr(joint_gathers.JointGathers, "_launch_reserved", slowly)
    model = make(slots)
    for skipping in range(4):
        model.skips = {torch.device(slots[skipping]): 0}
        with torch.no_grad():
            model(rows(slots))
        assert bytes_waiting(model) == 0
        assert not units(model)[0].binding.gather_budget._has_given_up


@pytest.mark.slots(4)
def test_a_forward_that_fails_leaves_nothing_waiting(slots):
    model = make(slots)
    expected = steps(make(slots), slots)
    model.fails = True
    with pytest.raises(ArithmeticError):
        model(rows(slots))
    assert bytes_waiting(model) == 0
    assert not any(unit.joint._untaken for unit in units(model))
    model.fails = False
    assert all(map(torch.equal, steps(model, slots), expected))


@pytest.mark.slots(4)
def test_what_waits_is_not_used_after_a_change(slots):
    """The slot that comes after the change has the new values."""
    model = make(slots)
    unit = units(model)[1]
    unit.refresh()
    first, second = unit.slot_units[:2]
    first.start(unit.streams.now())
    unit.make_owners_wait()
    with torch.no_grad():
        next(iter(model.blocks[0].parameters())).mul_(2)
    second.make_full(unit.streams.now())
    expected = next(iter(model.blocks[0].parameters())).full_tensor()
    assert torch.equal(second.parameters[0].cpu(), expected.detach().cpu())
    unit.free()
    unit.make_owners_wait()
    assert not unit.joint._untaken


@pytest.mark.slots(4)
def test_no_room_on_a_device_names_it(slots, monkeypatch):
    """It is the device for which another slot's gather has no room, and the next call finds everything as it was."""
    model = make(slots)
    expected = steps(make(slots), slots)
    empty = torch.empty

    def without_room(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == slots[2]:
            raise torch.OutOfMemoryError("no room")
        return empty(*args, **kwargs)

    for unit in units(model):
        unit.refresh()
    with monkeypatch.context() as patch:
        patch.setattr(joint_gathers.torch, "empty", without_room)
        for unit in units(model):
            with pytest.raises(torch.OutOfMemoryError, match=f"^{slots[2]} has no room for .* of parameters of the"):
                unit.slot_units[0].start(unit.streams.now())
            assert not unit.slot_units[0].is_started
    assert all(map(torch.equal, steps(model, slots), expected))
    assert bytes_waiting(model) == 0
