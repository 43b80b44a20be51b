"""`scatter` splits nested structures over the slots, and `gather` joins them again.

Outputs that only replicas return are in test_gather, types of containers in test_batch_types.
"""

import collections
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clocked import timeline
from dataparallel import gather, scatter, scatter_kwargs, whole

DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]


class Pair(NamedTuple):
    left: Any
    right: Any


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(-9, 9, shape).to(dtype)


@st.composite
def structures(draw: st.DrawFn) -> tuple[Any, int, int]:
    """A nested structure, the dimension to split and the batch size."""
    dim, size = draw(st.integers(-3, 2)), draw(st.integers(0, 9))

    def tensor(shape: list[int], dtype: torch.dtype, transposed: bool) -> Tensor:
        shape[dim] = size
        # Split from the last transposed dimensions too: such chunks are strided.
        made = numbers(*shape[:1], *reversed(shape[1:]), dtype=dtype).transpose(1, 2)
        return made if transposed else made.contiguous()

    shapes = st.lists(st.integers(0, 3), min_size=3, max_size=3)
    tensors = st.builds(tensor, shapes, st.sampled_from(DTYPES), st.booleans())
    leaves = tensors | st.sampled_from([None, "text", 3, 2.5, (), True])
    keys = st.sampled_from(["a", "b", 1, None])
    nested = st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.builds(Pair, inner, inner)
            | st.dictionaries(keys, inner, max_size=3)
            | st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict)
        ),
        max_leaves=8,
    )
    return draw(st.tuples(tensors, nested)), dim, size


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.to(expected.device), expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


def moved(tree: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


@given(structures(), st.integers(1, 5), st.sets(st.integers(1, 8), max_size=4), st.booleans(), st.booleans())
def test_chunks_come_back(
    make_slots: Any, made: Any, count: int, cuts: set[int], is_on_host: bool, is_given: bool
) -> None:
    """Near-equal chunks, or those of given sizes."""
    (tensor, rest), dim, size = made
    cuts = {cut for cut in cuts if cut < size}
    sizes = [end - start for start, end in pairwise([0, *sorted(cuts), size])] if is_given and size else None
    slots = make_slots(len(sizes) if sizes else count)
    tree = moved((tensor, rest), slots[0])
    parts = scatter((tensor, rest) if is_on_host else tree, slots, dim, chunk_sizes=sizes)
    # torch makes several empty chunks of nothing; here it runs on one slot.
    expected = tree[0].split(sizes, dim) if sizes else torch.chunk(tree[0], count if size else 1, dim)
    assert_same([part[0] for part in parts], list(expected))
    assert [part[0].device for part in parts] == [torch.device(slot) for slot in slots[: len(parts)]]
    assert_same(gather(parts, slots[0], dim), tree)


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.parametrize("is_on_host", [True, False])
def test_small_tensors_travel_together(slots: list, root: torch.device, is_on_host: bool) -> None:
    """Ten times as many of them are no more copies between devices. Each chunk has memory of its own."""

    def made(count: int) -> list[Tensor]:
        tensors = [torch.arange(21.0).reshape(7, 3) + k for k in range(count)]
        return tensors if is_on_host else [tensor.to(root) for tensor in tensors]

    copies = []
    for count in (4, 40):
        tensors = made(count)
        with timeline() as watched:
            parts = scatter(tensors, slots)
        between = [
            launch.copy for launch in watched.recording.launches if launch.copy and launch.copy[0] != launch.copy[1]
        ]
        copies.append(len(between))
        for of_slot in parts if is_on_host else parts[1:]:
            of_slot[1].resize_(14, 3).fill_(-1.0)
        for index in {*range(count)} - {1}:
            joined = torch.cat([of_slot[index].cpu() for of_slot in parts])
            assert torch.equal(joined, tensors[index].cpu())
    elsewhere = [slot for slot in slots if is_on_host or slot != root]
    assert copies[0] == copies[1] == len(elsewhere)


def test_whole_tensors_go_to_every_slot(slots: list, root: torch.device) -> None:
    table = numbers(5, 5).to(root)
    marked = whole(table)
    parts = scatter((numbers(4, 2).to(root), marked, {"again": table[:4]}), slots)
    assert len(parts) == 2
    assert all(torch.equal(part[1].to(root), table) for part in parts)
    assert marked.data_ptr() == table.data_ptr(), "another tensor on the same memory"
    assert [part.shape[0] for part in scatter(table, slots)] == [2, 2, 1], "the argument has no mark"
    assert [part.shape[0] for part in scatter(marked * 1, slots)] == [2, 2, 1], "nor have results"
    assert [again[1].shape[0] for again in scatter(parts[0], slots[:2])] == [5, 5], "it stays for another scatter"
    with pytest.raises(ValueError, match="batch sizes disagree"):
        scatter((numbers(4, 2), numbers(5, 5)), slots)


def test_samples_along_another_dimension_are_found(slots: list) -> None:
    """The state of an LSTM has them along dimension 1."""
    x, state = numbers(6, 5, 4), numbers(1, 6, 3)
    with pytest.raises(ValueError, match=r"If input\[1\] has its samples along dimension 1, pass it transposed, so"):
        scatter((x, state), slots)
    with pytest.raises(ValueError, match=r"If input\[0\] has its samples along dimension 1, pass it transposed, so"):
        scatter((state, x), slots)
    with pytest.raises(ValueError, match=r"as dataparallel\.samples\(list\)$"):
        scatter((x, numbers(2)), slots)
    assert len(scatter((x, state.transpose(0, 1)), slots)) == len(slots)


def test_gradients_of_a_whole_tensor_are_summed(slots: list, root: torch.device) -> None:
    table = torch.ones(2, device=root, requires_grad=True)
    parts = scatter((numbers(6).to(root), whole(table)), slots)
    sum((part[1] * 10**slot).sum().to(root) for slot, part in enumerate(parts)).backward()
    assert table.grad.tolist() == [111, 111]


def test_tensors_without_dimensions_go_to_every_slot(slots: list, root: torch.device) -> None:
    scale = torch.tensor(2.0, device=root, requires_grad=True)
    parts = scatter((numbers(4, 1).to(root), scale), slots, dim=1 - 1)
    assert [part[1].item() for part in parts] == [2, 2]
    sum(part[1].to(root) for part in parts).backward()
    assert scale.grad.item() == 2


def test_one_tensor_in_two_places_stays_one(slots: list, root: torch.device) -> None:
    x, scale, table = numbers(6, 2).to(root), torch.tensor(1.0, device=root), whole(numbers(2).to(root))
    both, keywords = scatter_kwargs((x, [x], scale, table), {"x": x, "scale": scale, "table": table}, slots)
    for args, kwargs in zip(both, keywords, strict=True):
        assert args[0] is args[1][0] is kwargs["x"]
        assert args[2] is kwargs["scale"]
        assert args[3] is kwargs["table"]
    for first, second in scatter((x, x.clone()), slots):
        assert first is not second


def test_other_leaves_are_handed_on_by_reference_in_containers_of_their_own(slots: list, root: torch.device) -> None:
    array, opaque = np.arange(4), object()
    tree = {"x": numbers(6).to(root), "rest": [array, opaque]}
    parts = scatter(tree, slots)
    assert all(part["rest"][0] is array and part["rest"][1] is opaque for part in parts)
    assert len({id(part["rest"]) for part in (tree, *parts)}) == 4


def test_a_structure_without_a_tensor_to_split_is_repeated(slots: list) -> None:
    parts = scatter(["text", torch.tensor(1.0)], slots)
    assert [part[0] for part in parts] == ["text"] * 3
    assert len({id(part) for part in parts}) == 3


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (({"a": torch.zeros(4)}, torch.zeros(5)), {}, r'args\[0\]\["a"\] has 4, args\[1\] has 5'),
        ((torch.zeros(4),), {"mask": [1, torch.zeros(5)]}, r'args\[0\] has 4, kwargs\["mask"\]\[1\] has 5'),
        ((Pair(1, torch.zeros(4)), torch.zeros(1)), {}, r"args\[0\]\.right has 4, args\[1\] has 1"),
        ((), {"x": torch.zeros(4), "y": torch.zeros(0)}, r'kwargs\["x"\] has 4, kwargs\["y"\] has 0'),
    ],
)
def test_batch_sizes_that_disagree_are_named(args: tuple, kwargs: dict, message: str, slots: list) -> None:
    with pytest.raises(ValueError, match=rf"dimension 0: {message}.*dataparallel\.whole"):
        scatter_kwargs(args, kwargs, slots)


def test_a_tensor_without_the_dimension_is_named(slots: list) -> None:
    with pytest.raises(ValueError, match=r"input\[1\] of shape \(4,\) has no dimension 1 .*dataparallel\.whole"):
        scatter([torch.zeros(4, 4), torch.zeros(4)], slots, dim=1)
    with pytest.raises(ValueError, match=r"input of shape \(4,\) has no dimension -2 "):
        scatter(torch.zeros(4), slots, dim=-2)


def test_a_structure_that_contains_itself_is_refused(slots: list) -> None:
    cyclic: dict = {"x": torch.zeros(6)}
    cyclic["inner"] = [cyclic]
    with pytest.raises(ValueError, match=r'input\["inner"\]\[0\] contains itself'):
        scatter(cyclic, slots)
    shared = [torch.zeros(6)]
    assert len(scatter([shared, shared], slots)) == 3, "twice is no cycle"


def test_keyword_arguments_alone_and_positional_ones_alone(slots: list, root: torch.device) -> None:
    args, kwargs = scatter_kwargs((), {"x": numbers(2).to(root), "flag": True}, slots)
    assert args == ((), ())
    assert [(len(keywords["x"]), keywords["flag"]) for keywords in kwargs] == [(1, True)] * 2
    args, kwargs = scatter_kwargs((numbers(2).to(root),), None, slots)
    assert kwargs == ({}, {})
    assert scatter_kwargs((), {}, slots) == ((), ())
    assert scatter_kwargs((), None, slots) == ((), ())


@pytest.mark.parametrize("value", [3, [torch.zeros(2)], None])
def test_only_tensors_are_marked_whole(value: Any) -> None:
    with pytest.raises(TypeError, match=f"whole.* marks a tensor; got {type(value).__name__}"):
        whole(value)
