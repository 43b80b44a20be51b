"""``pad=`` fills outputs of replicas up to one size, in every dimension but that of the batch."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dataparallel import gather


@st.composite
def outputs(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """The shapes of the replicas' outputs, and the batch dimension."""
    dims, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 3), min_size=dims, max_size=dims)
    return [draw(sizes) for _ in range(replicas)], draw(st.integers(-dims, dims - 1))


def by_hand(parts: list[Tensor], dim: int, value: float) -> Tensor:
    most = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    results = []
    for part in parts:
        shape = list(most)
        shape[dim] = part.shape[dim]
        result = part.new_full(shape, value)
        result[tuple(slice(size) for size in part.shape)] = part.detach()
        results.append(result)
    return torch.cat(results, dim)


@given(outputs())
def test_outputs_of_any_sizes_are_joined(slots: list, drawn: tuple[list[list[int]], int]) -> None:
    """Gradients reach what the replicas returned, and nothing else."""
    shapes, dim = drawn
    parts = [
        torch.randn(shape, dtype=torch.float64, device=slots[replica % len(slots)], requires_grad=True)
        for replica, shape in enumerate(shapes)
    ]
    root = torch.device(slots[0])
    found = gather(parts, root, dim, pad=-2.0)
    expected = by_hand([part.detach().to(root) for part in parts], dim, -2.0)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    assert all(torch.equal(part.grad, 2 * part.detach()) for part in parts)


@pytest.mark.parametrize(
    ("dtype", "pad", "expected"),
    [
        (torch.int64, 50256, 50256),
        (torch.int64, 2**60 + 1, 2**60 + 1),
        (torch.bool, True, True),
        (torch.float16, float("-inf"), float("-inf")),
        (torch.complex64, 1j, 1j),
        (torch.float32, torch.tensor(2.0).numpy().sum(), 2.0),
    ],
)
def test_dtypes_stay(dtype: torch.dtype, pad: Any, expected: Any, slots: list, root: torch.device) -> None:
    parts = [torch.zeros(1, size, device=slot).to(dtype) for size, slot in zip((1, 3), slots, strict=False)]
    found = gather(parts, "cpu", pad=pad)
    assert (found.dtype, found.tolist()) == (dtype, [[0, expected, expected], [0, 0, 0]])


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int64, 0.5),
        (torch.uint8, 256),
        (torch.float16, -1e9),
        (torch.float32, 1j),
    ],
)
def test_a_value_that_the_dtype_does_not_have_is_refused(dtype: torch.dtype, pad: Any) -> None:
    parts = [torch.zeros(1, size).to(dtype) for size in (1, 3)]
    with pytest.raises(ValueError, match=r'cannot gather output\["x"\]: pad=.* is no value of dtype torch\.'):
        gather([{"x": part} for part in parts], "cpu", pad=pad)
    assert gather([parts[0], parts[0]], "cpu", pad=pad).shape == (2, 1), "nothing is filled"


@dataclasses.dataclass
class Output:
    ids: Any
    scores: Any


@pytest.mark.parametrize("make", [dict, Output], ids=lambda make: make.__name__)
def test_each_output_may_have_its_own_value(make: Any) -> None:
    parts = [
        make(ids=torch.ones(1, size, dtype=torch.int64), scores=({"first": torch.ones(1, size)}, torch.ones(1, 2)))
        for size in (1, 2)
    ]
    joined = gather(parts, "cpu", pad={"ids": 7, "scores": {0: {"first": -1.5}}})
    found = vars(joined) if make is Output else joined
    assert found["ids"].tolist() == [[1, 7], [1, 1]]
    assert found["scores"][0]["first"].tolist() == [[1, -1.5], [1, 1]]
    with pytest.raises(ValueError, match=r"output.*scores.*\[0\].*first.*; the argument pad=NUMBER of the form"):
        gather(parts, "cpu", pad={"ids": 7})


@pytest.mark.parametrize("dim", [0, 1])
def test_a_tuple_with_an_entry_for_each_step(dim: int, slots: list, root: torch.device) -> None:
    """As the scores and hidden states of ``generate``: a replica that has stopped earlier has made fewer of them."""

    def steps(count: int, samples: int, slot: Any) -> tuple[Any, ...]:
        entry = torch.ones(*([samples, 2] if dim == 0 else [2, samples]), device=slot)
        return tuple((entry * step, {"mask": entry > 0}, "text") for step in range(1, count + 1))

    replicas = [(1, 2), (3, 1), (2, 3)]
    parts = [steps(count, samples, slot) for (count, samples), slot in zip(replicas, slots, strict=False)]
    joined = gather(parts, root, dim, pad=0)
    assert len(joined) == 3
    assert [step[0].select(1 - dim, 0).tolist() for step in joined] == [
        [1, 1, 1, 1, 1, 1],
        [0, 0, 2, 2, 2, 2],
        [0, 0, 3, 0, 0, 0],
    ]
    assert joined[2][1]["mask"].select(1 - dim, 0).tolist() == [False, False, True, False, False, False]
    assert joined[2][2] == "text"


def test_what_padding_does_not_help_is_said_as_without_it() -> None:
    for first, second, message in (
        (torch.ones(1, 2), torch.ones(1, 3).double(), "replica 0 has dtype"),
        (torch.ones(1, 2), torch.ones(1, 3, 1), "replica 0 has shape"),
        (torch.ones(1, 2), torch.ones(()), "has no dimension 0"),
    ):
        for pad in (None, 0):
            with pytest.raises(ValueError, match=message) as caught:
                gather([first, second], "cpu", pad=pad)
            assert "pad=" not in str(caught.value)
