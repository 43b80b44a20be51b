"""Replicas are built from a plan; what they compute is in test_replicate, here is what surrounds building."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dataparallel.comm.streams.arrivals import ExpectedArrivals
from dataparallel.replicas.build import ParameterRegistry, bare_module, build_replica, collector_paused
from dataparallel.replicas.plan import ModulePlan

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


# The registry of a replica's parameters waits once for each stream, and only for its own parameters.
# ``tests/comm/streams/test_arrivals_lookups.py`` shows by clocks that every way to a parameter waits.

HERE, THERE = "here", "there"


class Bucket:
    """An arrival that notes who waits."""

    def __init__(self) -> None:
        self.waited: set = set()
        self.waits: list = []

    def make_wait(self, stream: object) -> None:
        self.waits.append(stream)
        self.waited.add(stream)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list:
    """A list with the current stream."""
    streams = [HERE]
    monkeypatch.setattr("dataparallel.replicas.build._current_stream", lambda index: streams[0])
    return streams


def registry_of(first: Bucket, second: Bucket) -> ParameterRegistry:
    """Two parameters in two buckets, one that is ``None``, and a third bucket of another module."""
    expected = ExpectedArrivals()
    expected.by_position = [first, second, None]  # type: ignore[list-item]
    registry = ParameterRegistry({"weight": 0, "bias": 1, "none": -1}, expected)
    registry.update(weight=torch.ones(1), bias=torch.zeros(1), none=None)
    return registry


def test_a_lookup_waits_for_its_bucket_once_for_each_stream(current: list) -> None:
    first, second = Bucket(), Bucket()
    registry = registry_of(first, second)
    for stream in (HERE, HERE, THERE, HERE, THERE):
        current[0] = stream
        assert registry["weight"].item() == 1
    assert (first.waits, second.waits) == ([HERE, THERE], [])


@pytest.mark.parametrize("way", ["items", "values", "copy", "popitem", "__iter__", "__repr__"])
def test_other_ways_wait_for_the_whole_module_once(way: str, current: list) -> None:
    first, second = Bucket(), Bucket()
    registry = registry_of(first, second)
    for _ in range(2):
        getattr(registry, way)()
    assert (first.waits, second.waits) == ([HERE], [HERE])


def test_names_wait_for_nothing(current: list) -> None:
    first, second = Bucket(), Bucket()
    registry = registry_of(first, second)
    assert "weight" in registry
    assert len(registry) == 3
    assert [*registry.keys()] == ["weight", "bias", "none"]
    assert registry["none"] is None
    assert not first.waits + second.waits


def test_new_names_and_missing_ones(current: list) -> None:
    registry = registry_of(Bucket(), Bucket())
    registry["new"] = torch.ones(2)
    assert registry["new"].shape == (2,)
    del registry["weight"]
    with pytest.raises(KeyError, match="weight"):
        registry["weight"]
