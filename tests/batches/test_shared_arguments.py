"""What all replicas of a call would get whole: refused where they cannot share it or where it is a batch."""

import argparse
import io
import itertools
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dataparallel import PerReplica, samples, scatter, scatter_kwargs, whole
from dataparallel.batches.scatter import MOST_VALUES


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return torch.arange(6.0, device=root)


class Slotted:
    __slots__ = ("targets",)

    def __init__(self, targets: Any) -> None:
        self.targets = targets


class Graphs:
    """Tensors behind two other objects."""

    def __init__(self, nodes: Tensor) -> None:
        self.store = types.SimpleNamespace(mapping={"count": 3, "nodes": nodes})


def holding(tensor: Any) -> list[Any]:
    return [
        types.SimpleNamespace(step=3, targets=tensor),
        Slotted(tensor),
        Graphs(tensor),
        argparse.Namespace(a=[tensor]),
    ]


class TestIterators:
    @pytest.mark.parametrize(
        "make",
        [lambda: (i for i in range(9)), lambda: iter([1, 2]), lambda: map(int, "12"), itertools.count],
        ids=["generator", "iterator of a list", "map", "count"],
    )
    def test_they_are_refused_by_name(self, make: Any, x: Tensor, slots: list) -> None:
        made = make()
        message = rf'kwargs\["more"\]\[0\] is one {type(made).__name__} for 3 replicas.*samples\(list\).*PerReplica'
        with pytest.raises(ValueError, match=message):
            scatter_kwargs((x,), {"more": [made]}, slots)
        with pytest.raises(ValueError, match="for 3 replicas"):
            scatter_kwargs((made,), {}, slots)
        assert next(made) in (0, 1), "nothing was taken from it"

    def test_one_replica_may_have_one(self, x: Tensor, slots: list) -> None:
        made = iter([1, 2])
        assert scatter([x[:1], made], slots)[0][1] is made
        assert scatter([x, made], slots[:1])[0][1] is made

    def test_each_replica_or_sample_may_have_its_own(self, x: Tensor, slots: list) -> None:
        own = [iter([i]) for i in range(6)]
        assert [part[1] for part in scatter([x, PerReplica(own[:3])], slots)] == own[:3]
        assert [part[1] for part in scatter([x, samples(own)], slots)] == [own[:2], own[2:4], own[4:]]

    def test_what_can_be_read_more_than_once_is_shared(self, x: Tensor, slots: list) -> None:
        shared = [range(5), {1: 2}.items(), io.StringIO(), torch.Generator(), np.random.default_rng(), iter]
        for part in scatter([x, *shared], slots):
            assert all(mine is given for mine, given in zip(part[1:], shared, strict=True))


class TestObjectsThatHoldTensors:
    def test_a_batch_is_refused(self, x: Tensor, slots: list) -> None:
        for obj in holding(torch.randn(6, 2)):
            message = (
                rf"args\[1\] is one {type(obj).__name__} for 3 replicas.* of shape \(6, 2\).*register_batch.*whole"
            )
            with pytest.raises(ValueError, match=message):
                scatter_kwargs((x, obj), {}, slots)

    def test_a_batch_along_another_dimension_is_refused(self, slots: list, root: torch.device) -> None:
        obj = types.SimpleNamespace(targets=torch.randn(2, 6))
        with pytest.raises(ValueError, match="tensor 'targets'"):
            scatter([torch.ones(3, 6, device=root), obj], slots, dim=1)
        assert scatter([torch.ones(2, 5, device=root), obj], slots, dim=1)[0][1] is obj

    def test_where_nothing_else_is_split_it_is_refused(self, slots: list) -> None:
        for obj in holding(torch.randn(4, 2)):
            with pytest.raises(ValueError, match=r"args\[0\] is one .* of shape \(4, 2\) looks like a batch"):
                scatter_kwargs((obj,), {"mode": "train"}, slots)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.randn(5, 6),
            torch.tensor(6.0),
            nn.Parameter(torch.randn(6, 2)),
            whole(torch.randn(6, 2)),
            nn.Linear(6, 6),
            torch.Size([6]),
        ],
        ids=["table", "0-dim", "parameter", "whole", "module", "size"],
    )
    def test_what_is_no_batch_is_shared(self, tensor: Any, x: Tensor, slots: list) -> None:
        for obj in holding(tensor):
            assert [part[1] for part in scatter([x, obj], slots)] == [obj] * 3

    def test_one_replica_and_those_with_an_entry_each_get_it(self, x: Tensor, slots: list) -> None:
        for obj in holding(torch.randn(1, 2)):
            assert scatter([x[:1], obj], slots)[0][1] is obj
            assert scatter([obj], slots[:1])[0][0] is obj
            assert [part[0] for part in scatter([obj, PerReplica("abc")], slots)] == [obj] * 3
            assert [part[0] for part in scatter([PerReplica([obj] * 3)], slots)] == [obj] * 3

    def test_objects_may_lead_to_each_other_and_to_much_else(self, x: Tensor, slots: list) -> None:
        first, second = types.SimpleNamespace(), types.SimpleNamespace()
        first.other, second.other = second, first
        first.words = {word: [word] for word in range(10 * MOST_VALUES)}
        assert scatter([x, first], slots)[2][1] is first


@pytest.mark.usefixtures("nothing_said")
class TestLists:
    def said(self, *args: Any, slots: list, **kwargs: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scatter_kwargs(args, kwargs, slots)
        return [str(each.message) for each in caught]

    @pytest.mark.parametrize(
        "sequence", [np.zeros((6, 2)), tuple("abcdef"), [{"id": i} for i in range(6)]], ids=["array", "tuple", "dicts"]
    )
    def test_one_as_long_as_the_batch_is_said_once(self, sequence: Any, x: Tensor, slots: list) -> None:
        (message,) = self.said({"x": x, "more": sequence}, slots=slots)
        assert f'args[0]["more"] is a {type(sequence).__name__} of length 6, and the batch has 6 samples' in message
        assert "dataparallel.samples(list)" in message
        assert "torch.from_numpy(array)" in message
        assert self.said({"x": x, "more": sequence}, slots=slots) == []

    @pytest.mark.parametrize("sequence", [np.zeros((4, 2)), ["a", "b"]], ids=["array", "list"])
    def test_so_is_one_where_nothing_is_split(self, sequence: Any, slots: list) -> None:
        (message,) = self.said(sequence, slots=slots)
        assert "nothing in the call is split: all 3 replicas get the whole of it" in message

    def test_what_is_no_batch_is_not_said(self, x: Tensor, slots: list) -> None:
        said = self.said
        assert (
            said(x, np.zeros((5, 6)), np.float64(6), "abcdef", list("abc"), {str(i): i for i in range(6)}, slots=slots)
            == []
        )
        assert said(x[:3], size=(3, 3, 3), slots=slots) == []
        assert said("a", "b", x[:3], slots=slots) == [], "the arguments themselves"
        assert said(size=[3, 4], text="abc", slots=slots) == []
        assert said([x, x, x, x, x, x], samples(list("abcdef")), torch.from_numpy(np.zeros(6)), slots=slots) == []
        assert said(x[:1], ["a"], slots=slots) == [], "one replica computes all of it"
        assert said(PerReplica("abc"), ["a", "b"], slots=slots) == []
