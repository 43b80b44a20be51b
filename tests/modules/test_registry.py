"""The registry of a replica's parameters waits once for each stream, and only for its own parameters.

``tests/streams/test_arrivals_lookups.py`` shows by clocks that every way to a parameter waits.
"""

import pytest
import torch

from dataparallel.modules.registry import ParameterRegistry
from dataparallel.streams.arrivals import Expected

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
    monkeypatch.setattr("dataparallel.modules.registry._current_stream", lambda index: streams[0])
    return streams


def registry_of(first: Bucket, second: Bucket) -> ParameterRegistry:
    """Two parameters in two buckets, one that is ``None``, and a third bucket of another module."""
    expected = Expected()
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
