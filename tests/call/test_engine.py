"""The four stages: what a user overrides is called as torch calls it, whatever the engine would do.

Around them a context tells how a call ended, and a single slot runs the module itself.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, replicate
from dataparallel.call.engine import Call, run_alone
from dataparallel.call.options import BatchSplit


@pytest.fixture
def net(root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).to(root)


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return torch.randn(9, 4).to(root)


@pytest.mark.parametrize("name", ["scatter", "replicate", "parallel_apply", "gather"])
def test_a_stage_that_is_patched_on_the_class_is_called(name: str, net: nn.Module, slots: list, x: Tensor) -> None:
    model = DataParallel(net, slots)
    with mock.patch.object(DataParallel, name, autospec=True, side_effect=getattr(DataParallel, name)) as stage:
        torch.testing.assert_close(model(x), net(x))
    assert stage.call_count == 1


@pytest.mark.parametrize("name", ["scatter", "replicate", "parallel_apply"])
def test_a_stage_may_assign_what_later_stages_read(name: str, net: nn.Module, slots: list, x: Tensor) -> None:
    class Assigns(DataParallel):
        def assign(self) -> None:
            self.output_device = torch.device("cpu")
            self.dim = 1

    def stage(self: Any, *args: Any) -> Any:
        found = getattr(super(Assigns, self), name)(*args)
        self.assign()
        return found

    setattr(Assigns, name, stage)
    output = Assigns(net, slots)(x)
    assert output.device.type == "cpu"
    assert output.shape == (3, 3 * len(slots))


def test_a_dimension_is_any_integer(net: nn.Module, slots: list, x: Tensor) -> None:
    model = DataParallel(net, slots, dim=numpy.int64(0))  # type: ignore[arg-type]
    assert type(model.dim) is int
    torch.testing.assert_close(model(x), net(x))
    for wrong in (True, 0.0, "0"):
        with pytest.raises(TypeError, match="the batch dimension is an int"):
            DataParallel(net, slots, dim=wrong)  # type: ignore[arg-type]


class Kept:
    """In place of `KeptReplicas`: notes how calls end."""

    def __init__(self, is_frozen: bool = False) -> None:
        self.is_frozen = is_frozen
        self.told: list[str] = []

    def end_call(self) -> None:
        self.told.append("end_call")

    def forget_last_call(self) -> None:
        self.told.append("forget_last_call")


def call_of(devices: list[torch.device], kept: Kept) -> Call:
    return Call(devices, kept, None, False, BatchSplit(None, len(devices)))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def devices(slots: list) -> list[torch.device]:
    return [torch.device(slot) for slot in slots]


def test_the_end_is_told(devices: list[torch.device]) -> None:
    kept = Kept()
    with call_of(devices, kept) as call:
        replicas = [nn.Identity()]
        assert call.uses(replicas) is replicas
        assert kept.told == []
    assert kept.told == ["end_call"]


def test_a_failure_is_told(devices: list[torch.device]) -> None:
    kept = Kept()
    with pytest.raises(ZeroDivisionError), call_of(devices, kept) as call:  # noqa: PT012
        call.uses([nn.Identity()])
        1 / 0  # noqa: B018
    assert kept.told == ["forget_last_call"]


def test_a_call_without_replicas_ends_nothing(devices: list[torch.device]) -> None:
    kept = Kept()
    with call_of(devices, kept):
        pass
    with pytest.raises(ZeroDivisionError), call_of(devices, kept):
        1 / 0  # noqa: B018
    assert kept.told == []


def circular(root: torch.device) -> nn.Module:
    """A source whose attribute leads back to it."""
    source = nn.Sequential(nn.Linear(2, 2)).to(root)
    source[0].above = [source]
    return source


@pytest.mark.reuses("circles are left to the collector otherwise")
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_frozen", [False, True], ids=["not frozen", "frozen"])
def test_circular_replicas_are_taken_apart_unless_they_stay(
    is_frozen: bool, devices: list[torch.device], root: torch.device
) -> None:
    def stages(call: Call) -> list[weakref.ref[nn.Module]]:
        return [*map(weakref.ref, call.uses(replicate(circular(root), devices)))]

    with call_of(devices, Kept(is_frozen)) as call:
        replicas = stages(call)
    assert [replica() is None for replica in replicas] == [not is_frozen] * len(devices)


def test_several_replicas_are_refused_inside_a_transform(devices: list[torch.device], root: torch.device) -> None:
    def run(x: Tensor) -> Tensor:
        with call_of(devices[:1], Kept()):
            pass
        with pytest.raises(RuntimeError, match=r"torch\.func transform"):
            call_of(devices, Kept())
        return x

    torch.func.vmap(run)(torch.ones(2, 1, device=root))


def test_alone_the_output_is_handed_on_or_moved(root: torch.device) -> None:
    x = torch.ones(2, device=root)
    assert run_alone(lambda x, *, times: {"y": x}, (x,), {"times": 1}, root, root)["y"] is x
    assert run_alone(lambda x: [x], (x,), {}, root, torch.device("cpu"))[0].device.type == "cpu"


@pytest.mark.devices("sim", "cuda")
def test_alone_the_slot_is_the_current_device() -> None:
    before = torch.accelerator.current_device_index()
    slot = torch.device(torch.accelerator.current_accelerator().type, 1)
    assert run_alone(torch.accelerator.current_device_index, (), {}, slot, slot) == 1
    assert torch.accelerator.current_device_index() == before
