"""The four stages: what a user overrides is called as torch calls it, whatever the engine would do.

Around them a context tells how a call ended, and a single slot runs the module itself.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.call.engine import Call, Method
from dataparallel.call.options import CallOptions
from dataparallel.replicas.kept_replicas import KeptReplicas


@pytest.fixture
def net(root: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).to(root)


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return torch.randn(9, 4).to(root)


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


def call_of(devices: list[torch.device], kept: KeptReplicas | None = None) -> Call:
    options = CallOptions(devices, {"output_device": None, "serial": None, "pad": None})
    maker: Any = SimpleNamespace(
        options=options, kept=kept or KeptReplicas(), may_use_source=False, check=lambda slots: None
    )
    return Call(maker, Method("forward", lambda: None))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def devices(slots: list) -> list[torch.device]:
    return [torch.device(slot) for slot in slots]


def circular(root: torch.device) -> nn.Module:
    """A source whose attribute leads back to it."""
    source = nn.Sequential(nn.Linear(2, 2)).to(root)
    source[0].above = [source]
    return source


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_frozen", [False, True], ids=["not frozen", "frozen"])
def test_circular_replicas_are_freed_at_the_end_unless_they_stay(
    is_frozen: bool, devices: list[torch.device], root: torch.device
) -> None:
    kept, source = KeptReplicas(), circular(root)

    def stages(call: Call) -> list[weakref.ref[nn.Module]]:
        return [*map(weakref.ref, call.uses(kept.replicas(source, devices, 2**20)))]

    with torch.no_grad(), kept.frozen() if is_frozen else nullcontext():
        with call_of(devices, kept) as call:
            replicas = stages(call)
            assert all(replica()[0].above[0] is replica() for replica in replicas)
        assert [replica() is None for replica in replicas] == [not is_frozen] * len(devices)
    assert [replica() is None for replica in replicas] == [True] * len(devices)


@pytest.mark.usefixtures("no_collector")
def test_circular_replicas_of_a_failed_call_are_freed_with_the_error(
    devices: list[torch.device], root: torch.device
) -> None:
    kept, source, replicas = KeptReplicas(), circular(root), []
    with pytest.raises(ZeroDivisionError) as caught, torch.no_grad(), call_of(devices, kept) as call:  # noqa: PT012
        replicas += map(weakref.ref, call.uses(kept.replicas(source, devices, 2**20)))
        1 / 0  # noqa: B018
    del caught, call
    assert [replica() is None for replica in replicas] == [True] * len(devices)


def test_several_replicas_are_refused_inside_a_transform(devices: list[torch.device], root: torch.device) -> None:
    def run(x: Tensor) -> Tensor:
        with call_of(devices[:1]):
            pass
        with pytest.raises(RuntimeError, match=r"torch\.func transform"):
            call_of(devices)
        return x

    torch.func.vmap(run)(torch.ones(2, 1, device=root))
