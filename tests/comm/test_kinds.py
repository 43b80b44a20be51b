"""Copies and chunks are of the kind of the original: its class, what it consists of, its Python attributes."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import comm
from dataparallel.comm.kinds import inner_tensors
from dataparallel.devices import resolve_each
from wrapper_tensors import WRAPPERS, Batch, Forgetful, Quantised, QuantState


def values(root: torch.device, rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(root)


def memory(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of."""
    inner = inner_tensors(tensor)
    return [part for each in inner.values() for part in memory(each)] if inner else [tensor]


# Wrappers


@pytest.mark.parametrize("cls", WRAPPERS)
@pytest.mark.parametrize("transport", ["copy", "host"])
def test_a_wrapper_is_whole_on_each_slot(cls: type[Quantised], transport: str, slots: list, root: torch.device) -> None:
    original = cls.of(values(root))
    original.note = ["mine"]
    with comm.using(transport=transport):
        copies = comm.broadcast(original, slots)
    for copy, device in zip(copies, resolve_each(slots), strict=True):
        assert type(copy) is cls
        assert {part.device for part in memory(copy)} == {device}
        assert torch.equal(copy.plain().to(root), original.plain())
        assert copy.note is original.note
    assert {part.device for part in memory(original)} == {root}


@pytest.mark.parametrize("cls", WRAPPERS)
def test_a_wrapper_has_memory_of_its_own_where_it_is_asked_for(cls: type[Quantised], slots: list) -> None:
    original = cls.of(values(torch.device(slots[0])))
    copies = [copy for (copy,) in comm.broadcast_coalesced([original], slots, own_storage=True)]
    addresses = [part.data_ptr() for copy in copies for part in memory(copy)]
    assert len({*addresses}) == len(addresses)


def test_a_wrapper_is_cut_and_joined_by_its_own_rules(slots: list, root: torch.device) -> None:
    original = Batch.of(values(root, 7))
    chunks = comm.scatter(original, slots)
    assert [len(chunk) for chunk in chunks] == [3, 3, 1]
    assert [{part.device for part in memory(chunk)} for chunk in chunks] == [{each} for each in resolve_each(slots)]
    joined = comm.gather(chunks, destination=root)
    assert type(joined) is Batch
    assert torch.equal(joined.plain(), original.plain())


@pytest.mark.devices("sim", "cuda")
@pytest.mark.apart(2)
def test_a_wrapper_that_does_not_stay_one_is_refused_by_name(slots: list, root: torch.device) -> None:
    original = Forgetful.of(values(root))
    with pytest.raises(TypeError, match=r"a Forgetful consists of other tensors.* made a Tensor.*_to_copy"):
        comm.broadcast(original, slots)


# Classes with methods of their own


class Distribution(Tensor):
    """Like BigGAN's. Its methods need attributes, and a chunk or a copy has none yet."""

    def _made(self, made: Tensor) -> Tensor:
        made.kind = self.kind
        return made

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._made(super().to(*args, **kwargs))

    def detach(self) -> Tensor:
        return self._made(super().detach())

    def clone(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._made(super().clone(*args, **kwargs))

    def split(self, *args: Any, **kwargs: Any) -> Any:
        return [*map(self._made, super().split(*args, **kwargs))]


def distribution(numbers: Tensor) -> Distribution:
    made = numbers.as_subclass(Distribution)
    made.kind = "normal"
    return made


@pytest.mark.parametrize("transport", ["copy", "host"])
def test_no_method_of_a_class_is_called_on_a_chunk(transport: str, slots: list, root: torch.device) -> None:
    original = distribution(values(root))
    with comm.using(transport=transport):
        chunks = comm.scatter(original, slots)
        copies = comm.broadcast(original, slots)
        _, (own,) = comm.broadcast_coalesced([original], [root, root], own_storage=True)
    for each in (*chunks, *copies, own):
        assert type(each) is Distribution
        assert each.kind == "normal"


def test_no_method_of_a_class_is_called_on_a_term(slots: list, root: torch.device) -> None:
    terms = [torch.ones(3, dtype=torch.float16, device=slot).as_subclass(Distribution) for slot in slots]
    assert comm.reduce_add(terms, root).tolist() == [3.0] * 3


# Python attributes


def with_state(root: torch.device) -> Tensor:
    scale = torch.full((2,), 3.0, device=root)
    made = torch.ones(4, device=root)
    made.scale = scale
    made.table = OrderedDict(scale=[scale], name="table")
    made.state = QuantState(scale, QuantState(scale))
    made.itself = made
    made.on_the_host = torch.ones(1)
    made.plain = {"rows": 3}
    return made


def test_tensors_in_attributes_follow(slots: list, root: torch.device) -> None:
    original = with_state(root)
    for copy, device in zip(comm.broadcast(original, slots), resolve_each(slots), strict=True):
        scale = copy.scale
        assert scale.device == device
        assert scale.tolist() == [3.0, 3.0]
        assert copy.table["scale"][0] is copy.state.scale is copy.state.inner.scale is scale
        assert copy.itself is copy
        assert type(copy.state) is QuantState
        assert type(copy.table) is OrderedDict
        assert (copy.state.kind, copy.table["name"]) == ("int8", "table")
        assert copy.plain is original.plain
        assert copy.on_the_host is original.on_the_host
    assert original.state.scale is original.state.inner.scale is original.scale
    assert original.scale.device == root
    for chunk, device in zip(comm.scatter(original, slots), resolve_each(slots), strict=False):
        assert chunk.scale.device == device
        assert chunk.scale.tolist() == [3.0, 3.0]


def test_attributes_that_need_gradients_and_what_is_no_state_stay(slots: list, root: torch.device) -> None:
    original = torch.ones(4, device=root)
    original.trained = torch.ones(2, device=root, requires_grad=True)
    original.module = nn.Linear(2, 2).to(root)
    original.other = SimpleNamespace(tensor=torch.ones(2, device=root))
    for copy in comm.broadcast(original, slots):
        assert vars(copy) == vars(original)
