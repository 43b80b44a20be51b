"""Replicas are built from a plan; what they compute is in test_replicate, here is what surrounds building."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dataparallel.modules.build import bare_module, build_replica, collector_paused
from dataparallel.modules.plan import ModulePlan

pytestmark = pytest.mark.devices("cpu")  # it is not about devices


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_the_collector_is_paused_and_runs_again() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_runs_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="half-made"), collector_paused():
        raise ValueError("half-made")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.parametrize("record", [True, False])
def test_a_replica_is_built_around_the_tensors(record: bool) -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plan = ModulePlan.of(source)
    tensors = [tensor.detach().clone() for tensor in plan.tensors]
    replica = build_replica(plan, tensors, record)
    assert [*map(id, (*replica.parameters(), *replica.buffers()))] == [*map(id, tensors)]
    assert all(isinstance(parameter, nn.Parameter) for parameter in replica.parameters())
    assert torch.equal(replica[0].weight, source[0].weight)


def test_a_bare_module_has_no_attributes() -> None:
    class WithArguments(nn.Module):
        def __new__(cls, width: int) -> "WithArguments":
            return super().__new__(cls)

    class BuiltIn(nn.Module, dict):  # type: ignore[type-arg]
        """A module that is also a dict."""

    for cls in (nn.Linear, WithArguments, BuiltIn):
        module = bare_module(cls)
        assert type(module) is cls
        assert vars(module) == {}
