"""Containers keep their type and whatever else they hold, leaves are not looked into, and batches are split.

What is split where is in test_scatter.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils import _pytree as pytree

from dataparallel import gather, scatter
from dataparallel.batch_types import register_batch, register_container
from dataparallel.batches import structures


def samples(count: int = 6) -> Tensor:
    return torch.arange(count)


class Pair(NamedTuple):
    left: Any
    right: Any


class NotedPair(Pair):
    """A namedtuple whose instances have attributes: no __slots__."""


class Noted(dict):
    note: str


class NotedList(list):
    note: str


class AttributeDict(dict):
    """The idiom in which items and attributes are the same thing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: Any
    y: Any = None


@dataclasses.dataclass
class Derived:
    x: Any
    y: Any = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.y = "y"


class Output(collections.OrderedDict):
    """Both a dataclass and a mapping, as model outputs of some libraries are: reads go either way."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass
class LossAndLogits(Output):
    logits: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


def noted(obj: Any) -> Any:
    obj.note = "kept"
    return obj


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda t: (t, "leaf"), lambda c: c[0]),
    "list": (lambda t: [t, "leaf"], lambda c: c[0]),
    "list subclass": (lambda t: noted(NotedList([t, "leaf"])), lambda c: c[0]),
    "namedtuple": (lambda t: Pair(t, "leaf"), lambda c: c.left),
    "namedtuple subclass": (lambda t: noted(NotedPair(t, "leaf")), lambda c: c.left),
    "dict": (lambda t: {"x": t, 2: "leaf"}, lambda c: c["x"]),
    "dict subclass": (lambda t: noted(Noted(x=t)), lambda c: c["x"]),
    "OrderedDict": (lambda t: collections.OrderedDict(z=t, a="leaf"), lambda c: c["z"]),
    "UserDict": (lambda t: collections.UserDict(x=t), lambda c: c["x"]),
    "dict of attributes, by key": (lambda t: AttributeDict(x=t), lambda c: c["x"]),
    "dict of attributes, by attribute": (lambda t: AttributeDict(x=t), lambda c: c.x),
    "dataclass": (lambda t: Plain(t, "leaf"), lambda c: c.x),
    "frozen dataclass": (lambda t: Frozen(t, "leaf"), lambda c: c.x),
    "frozen dataclass with slots": (lambda t: FrozenSlots(t, "leaf"), lambda c: c.x),
    "dataclass with init=False": (Derived, lambda c: c.x),
    "dataclass that is a mapping, by key": (LossAndLogits, lambda c: c["logits"]),
    "dataclass that is a mapping, by attribute": (LossAndLogits, lambda c: c.logits),
    "deque": (lambda t: collections.deque([t, "leaf"], maxlen=5), lambda c: c[0]),
    "return type of an operator": (lambda t: torch.max(torch.stack([t, t]), 0), lambda c: c.values),
}


@pytest.mark.parametrize(("make", "read"), CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers_are_split_and_joined(make: Callable, read: Callable, slots: list, root: torch.device) -> None:
    whole = make(samples().to(root))
    parts = scatter(whole, slots)
    assert [type(part) for part in parts] == [type(whole)] * 3
    assert [read(part).tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert read(whole).tolist() == [0, 1, 2, 3, 4, 5], "scatter leaves its argument alone"
    joined = gather(parts, root)
    assert type(joined) is type(whole)
    assert read(joined).tolist() == [0, 1, 2, 3, 4, 5]
    assert [read(part).tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]], "so does gather"
    for each in (*parts, joined):
        assert getattr(each, "note", None) == getattr(whole, "note", None)


def test_a_default_factory_is_kept(slots: list, root: torch.device) -> None:
    parts = scatter(collections.defaultdict(list, x=samples().to(root)), slots)
    assert parts[1]["new"] == []
    assert gather([{"x": part["x"]} for part in parts], root).keys() == {"x"}, "and keys made by it are that part's"


def test_the_length_of_a_deque_is_kept(slots: list) -> None:
    assert scatter(collections.deque([samples()], maxlen=4), slots)[0].maxlen == 4


def test_fields_that_were_never_set_stay_so(slots: list, root: torch.device) -> None:
    parts = scatter(Derived(samples().to(root)), slots)
    for each in (*parts, gather(parts, root)):
        assert each.y == "y"
        assert not hasattr(each, "unset")


def test_a_tuple_that_cannot_be_built_again_says_what_to_do(slots: list) -> None:
    class Point(tuple):
        def __new__(cls, x: Any, y: Any) -> "Point":
            return super().__new__(cls, (x, y))

    with pytest.raises(TypeError, match=r"Point.*dataparallel\.batch_types\.register_container"):
        scatter(Point(samples(), 1), slots)


class Mine:
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes back what a test registers: registrations have no public end."""
    for name in ("_containers", "_batches"):
        monkeypatch.setattr(structures, name, dict(getattr(structures, name)))


@pytest.mark.usefixtures("own_registry")
def test_a_registered_class_and_its_subclasses_are_containers(slots: list, root: torch.device) -> None:
    class Sub(Mine):
        pass

    with pytest.raises(
        ValueError, match=r"one Mine for 3 replicas.*tensor 'first' of shape \(6,\).*register_container"
    ):
        scatter(Mine(samples(), 1), slots)
    register_container(
        Mine,
        lambda obj: [("<first>", obj.first), ("<second>", obj.second)],
        lambda obj, values: type(obj)(*values),
    )
    parts = scatter(Sub(samples().to(root), 1), slots)
    assert [type(part) for part in parts] == [Sub] * 3
    assert gather(parts, root).first.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"output\[0\]<first>"):
        gather([[Sub(torch.zeros(2, 1), 1)], [Sub(torch.zeros(2, 2), 1)]], root)


@pytest.mark.usefixtures("own_registry")
def test_a_registration_comes_before_what_is_built_in(slots: list) -> None:
    register_container(NotedList, lambda obj: [], lambda obj, values: NotedList(["rebuilt"]))
    assert scatter(NotedList([samples()]), slots) == [["rebuilt"]] * 3


def test_classes_that_pytree_knows_are_containers(slots: list, root: torch.device) -> None:
    class Node(Mine):
        pass

    pytree.register_pytree_node(
        Node,
        lambda node: ([node.first, node.second], None),
        lambda values, _: Node(*values),
        flatten_with_keys_fn=lambda node: (
            [(pytree.MappingKey("first"), node.first), (pytree.GetAttrKey("second"), node.second)],
            None,
        ),
    )
    try:
        parts = scatter(Node(samples().to(root), "leaf"), slots)
        joined = gather(parts, root)
        assert (type(joined), joined.first.tolist(), joined.second) == (Node, [0, 1, 2, 3, 4, 5], "leaf")
        with pytest.raises(ValueError, match=r'output\["first"\]'):
            gather([Node(torch.zeros(2, 1), 1), Node(torch.zeros(2, 2), 1)], root)
    finally:
        pytree._deregister_pytree_node(Node)


class Sentences:
    """A batch of strings, as it might come from a tokenizer."""

    def __init__(self, texts: list[str], device: Any = None) -> None:
        self.texts, self.device = texts, device

    def to(self, device: torch.device) -> "Sentences":
        return Sentences(self.texts, device)


def register_sentences(**kwargs: Any) -> None:
    register_batch(
        Sentences,
        size=lambda batch: len(batch.texts),
        split=lambda batch, sizes: [
            Sentences(batch.texts[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))
        ],
        merge=lambda batches: Sentences([text for batch in batches for text in batch.texts], batches[0].device),
        **kwargs,
    )


@pytest.mark.usefixtures("own_registry")
def test_a_registered_batch_is_cut_moved_and_joined(slots: list, root: torch.device) -> None:
    register_sentences()
    parts = scatter([Sentences(list("abcde")), torch.arange(5).to(root)], slots, chunk_sizes=[1, 3, 1])
    assert [part[0].texts for part in parts] == [["a"], ["b", "c", "d"], ["e"]]
    assert [part[0].device for part in parts] == [torch.device(slot) for slot in slots]
    assert gather(parts, root)[0].texts == list("abcde")
    with pytest.raises(ValueError, match=r"input\[0\] has 2, input\[1\] has 3"):
        scatter([Sentences(["a", "b"]), torch.arange(3)], slots)


LENGTHS = {"sorted": [5, 4, 4, 2, 1, 1, 1], "unsorted": [1, 4, 2, 5, 1, 4, 1]}


def packed(kind: str, device: torch.device) -> tuple[PackedSequence, list[Tensor]]:
    sequences = [
        torch.randn(length, 2, dtype=torch.float64, device=device, requires_grad=True) for length in LENGTHS[kind]
    ]
    return pack_sequence(sequences, enforce_sorted=kind == "sorted"), sequences


@pytest.mark.parametrize("chunk_sizes", [None, [1, 4, 2]])
@pytest.mark.parametrize("kind", LENGTHS)
def test_packed_sequences_keep_samples_in_order(kind: str, chunk_sizes: Any, slots: list, root: torch.device) -> None:
    whole, sequences = packed(kind, root)
    parts = scatter(whole, slots, chunk_sizes=chunk_sizes)
    assert [int(part.batch_sizes[0]) for part in parts] == (chunk_sizes or [3, 3, 1])
    assert all((part.sorted_indices is None) == (kind == "sorted") for part in parts)
    split = [sequence for part in parts for sequence in unpack_sequence(part)]
    joined = gather(parts, root)
    assert type(joined) is PackedSequence
    assert (joined.sorted_indices is None) == (kind == "sorted")
    for found in (split, unpack_sequence(joined)):
        assert [len(sequence) for sequence in found] == LENGTHS[kind]
        assert all(torch.equal(a.to(root), b) for a, b in zip(found, sequences, strict=True))
