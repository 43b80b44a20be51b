"""`gather` joins the outputs of replicas into one structure, and names the place of what cannot be joined."""

import collections
import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from dataparallel import gather, samples

zeros, ones = torch.zeros, torch.ones


@dataclasses.dataclass
class Output:
    loss: Any
    logits: Any = None


def test_tensors_are_concatenated_along_the_dimension(root: torch.device) -> None:
    parts = [ones(2, 3, device=root), zeros(1, 3, device=root)]
    assert gather(parts, root).tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    parts = [ones(1, 2, device=root), zeros(1, 1, device=root)]
    assert gather(parts, root, dim=1).tolist() == [[1, 1, 0]]
    assert gather(parts, root, dim=-1).tolist() == [[1, 1, 0]]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tensors_without_dimensions_become_a_vector(dim: int, root: torch.device) -> None:
    losses = [torch.tensor(float(i), device=root, requires_grad=True) for i in range(3)]
    joined = gather([{"loss": loss} for loss in losses], root, dim)["loss"]
    assert joined.tolist() == [0, 1, 2]
    (joined * torch.tensor([1.0, 2.0, 3.0], device=root)).sum().backward()
    assert [loss.grad.item() for loss in losses] == [1, 2, 3]


@pytest.mark.parametrize("target", ["cpu", -1, torch.device("cpu")])
def test_the_target_may_be_the_cpu(target: Any, root: torch.device) -> None:
    assert gather([ones(1, device=root)] * 2, target).device == torch.device("cpu")


@pytest.mark.parametrize("leaf", [None, "text", 3, True, (), {}, float("inf"), torch.float32, torch.Size([2])])
def test_equal_leaves_stay_what_they_are(leaf: Any, root: torch.device) -> None:
    joined = gather([[leaf, ones(1, device=root)] for _ in range(3)], root)[0]
    assert type(joined) is type(leaf)
    assert joined == leaf


@pytest.mark.parametrize("leaves", [[1, 2, 1], ["a", None, "a"], [1, 1.0, True], [None, None, 0]])
def test_different_leaves_become_a_list(leaves: list, root: torch.device) -> None:
    joined = gather([{"x": leaf} for leaf in leaves], root)["x"]
    assert joined == leaves
    assert list(map(type, joined)) == list(map(type, leaves))


def test_nan_from_every_replica_is_one_nan(root: torch.device) -> None:
    assert math.isnan(gather([math.nan] * 3, root))
    assert math.isnan(gather([float("nan"), float("nan")], root))
    assert len(gather([1.0, float("nan")], root)) == 2


@given(st.lists(st.sampled_from([(0, 2), (1, 2), (2, 2), (2, 1), (1,), (2,), ()]), min_size=2, max_size=3))
def test_arrays_are_one_if_their_shapes_are_too(shapes: list[tuple[int, ...]]) -> None:
    """NumPy repeats entries where shapes differ: no array may stand for another that has other entries."""
    arrays = [np.ones(shape) for shape in shapes]
    joined = gather(arrays, "cpu")
    is_one = len({*shapes}) == 1
    assert joined is arrays[0] if is_one else [*map(id, joined)] == [*map(id, arrays)]


@pytest.mark.parametrize(
    "other", [np.ones(2, dtype=np.int64), np.ma.array([1.0, 5.0], mask=[False, True])], ids=["dtype", "mask"]
)
def test_arrays_with_another_dtype_or_mask_differ(other: Any) -> None:
    like = np.ma.array([1.0, 1.0]) if isinstance(other, np.ma.MaskedArray) else np.ones(2)
    assert len(gather([like, other], "cpu")) == 2


def test_objects_are_leaves_whatever_their_comparison_does(root: torch.device) -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> Any:
            raise ValueError("ambiguous")

    objects = [Odd(), Odd()]
    joined = gather(objects, root)
    assert [one is other for one, other in zip(joined, objects, strict=True)] == [True, True]
    assert gather([SimpleNamespace(a=1), SimpleNamespace(a=1)], root) == SimpleNamespace(a=1)


def test_keys_may_come_in_another_order(root: torch.device) -> None:
    joined = gather([{"a": 1, "b": ones(1, device=root)}, {"b": zeros(1, device=root), "a": 1}], root)
    assert list(joined) == ["a", "b"]
    assert joined["b"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("outputs", "path", "message"),
    [
        (
            [{"logits": [0, 1, ones(2, 3)]}, {"logits": [0, 1, ones(2, 4)]}],
            r'output["logits"][2]',
            r"replica 0 has shape \(2, 3\), replica 1 has \(2, 4\)",
        ),
        ([ones(2, 1), ones(2)], "output", r"replica 0 has shape \(2, 1\), replica 1 has \(2,\)"),
        ([ones(2), torch.tensor(1.0)], "output", r"replica 1 returned shape \(\), which has no dimension 0"),
        ([[ones(2)], [ones(2).double()]], "output[0]", r"replica 0 has dtype torch.float32.*1 has torch.float64"),
        ([{"a": {"b": 1}}, {"a": {"c": 1}}], 'output["a"]', r'replica 0 .*\["b"\].*replica 1 .*\["c"\]'),
        ([(1, [1, 2]), (1, [1])], "output[1]", r"replica 0 returned 2 elements.*replica 1 1 elements"),
        ([[(1,)], [[1]]], "output[0]", "replica 0 returned tuple, replica 1 returned list"),
        ([Output(ones(1)), Output(None)], "output.loss", "0 returned a tensor, replica 1 returned NoneType"),
        ([[None], [[1]]], "output[0]", "replica 0 returned NoneType, replica 1 returned list"),
        ([pack_sequence([ones(2)]), None], "output", "0 returned PackedSequence, replica 1 returned NoneType"),
        ([ones(2, 3), ones(2, 3), ones(2, 4)], "output", r"replica 0 has shape \(2, 3\), replica 2 has \(2, 4\)"),
    ],
)
def test_outputs_that_cannot_be_joined_are_named(outputs: list, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        gather(outputs, "cpu")
    assert f"cannot gather {path}:" in str(caught.value)


MANY = [ones(2, 3), zeros(1, 3)]
ADVICE = {
    "a key that some have": (
        [{"a": ones(2), "b": ones(2)}, {"a": ones(2)}],
        "return the same structure.*samples",
        [{"a": ones(2), "b": samples([ones(2)])}, {"a": ones(2), "b": samples([])}],
        lambda joined: len(joined["a"]) == 4 and len(joined["b"]) == 1,
    ),
    "samples along another dimension": (
        [part.T for part in MANY],
        "samples are along dimension 1, do not fill it: return it transposed.*along dimension 0",
        MANY,
        lambda joined: torch.equal(joined, torch.cat(MANY)),
    ),
    "one for each replica": (
        [part.T for part in MANY],
        r"or dataparallel.samples\(\[tensor\]\), which gives a list with one entry for each replica",
        [samples([part.T]) for part in MANY],
        lambda joined: [part.shape for part in joined] == [(3, 2), (3, 1)],
    ),
}


@pytest.mark.parametrize(("outputs", "message", "advised", "is_right"), ADVICE.values(), ids=ADVICE.keys())
def test_what_the_message_says_to_do_works(outputs: list, message: str, advised: list, is_right: Any) -> None:
    with pytest.raises(ValueError, match=message):
        gather(outputs, "cpu")
    assert is_right(gather(advised, "cpu"))


@pytest.mark.parametrize(
    "make",
    [collections.namedtuple, lambda name, fields: dataclasses.make_dataclass(name, fields.split())],
    ids=["namedtuple", "dataclass"],
)
def test_classes_that_replicas_make_are_one_if_name_and_fields_are(make: Any, root: torch.device) -> None:
    """Where ``forward`` defines what it returns, each replica has a class of its own."""
    parts = [make("Out", "logits mask")(ones(n, device=root), zeros(n, 1, device=root)) for n in (2, 1)]
    joined = gather([[part] for part in parts], root)[0]
    assert type(joined) is type(parts[0])
    assert (joined.logits.tolist(), joined.mask.tolist()) == ([1, 1, 1], [[0], [0], [0]])
    parts[1] = make("Out", "logits loss")(ones(1), ones(1))
    with pytest.raises(ValueError, match=r"0 returned .*mask.*, replica 1 .*loss.*register_batch"):
        gather(parts, root)


def lazily(x: Tensor) -> Any:
    yield x


async def later(x: Tensor) -> Tensor:
    return x


async def lazily_later(x: Tensor) -> Any:
    yield x


LATER: dict[str, Any] = {
    "map": lambda x: map(abs, [x]),
    "iterator": lambda x: iter([x]),
    "keys": lambda x: {"x": x}.keys(),
    "items": lambda x: {"x": x}.items(),
    "generator": lazily,
    "coroutine": later,
    "asynchronous generator": lazily_later,
}


@pytest.mark.usefixtures("warnings_are_errors")
@pytest.mark.parametrize("make", LATER.values(), ids=LATER.keys())
def test_what_gives_its_values_later_is_no_output(make: Any) -> None:
    with pytest.raises(TypeError, match=r'output\["x"\]: replica 0 returned .*let forward return the values'):
        gather([{"x": make(ones(1))} for _ in range(2)], "cpu")


def test_no_output_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one replica; got none"):
        gather([], "cpu")


def test_an_output_that_contains_itself_is_refused() -> None:
    cyclic: list = [ones(1)]
    cyclic.append({"again": cyclic})
    with pytest.raises(ValueError, match=r'output\[1\]\["again"\] contains itself'):
        gather([cyclic, cyclic], "cpu")
