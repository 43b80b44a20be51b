"""Copies keep layout, class and attributes, and sums run in slot order, in flat buffers and one by one.

The operations of every transport are tested by torch's copies. Buffers are flattened if tensors have to move. Without a
second device they move to ``cpu:0``, a name of the CPU that is not equal to ``cpu``, so that every copy is really made.
test_comm tests the checks of arguments.
"""

import operator
from collections.abc import Sequence
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensor_kinds import FORMS, Tagged, of_many_magnitudes, strides, tagged
from torch import Tensor

from dataparallel.comm.routes import STAR

CPU = torch.device("cpu")
CAPS = st.sampled_from([1, 64, 10 * 2**20])


@pytest.fixture
def elsewhere(root: torch.device) -> torch.device:
    """A device to which tensors of the CPU have to move."""
    return torch.device("cpu", 0) if root == CPU else root


@pytest.fixture(params=["here", "elsewhere"])
def destination(request: pytest.FixtureRequest, elsewhere: torch.device) -> torch.device:
    return elsewhere if request.param == "elsewhere" else CPU


DENSE_FORMS = [form for form in FORMS if form != "sparse"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int32, torch.bool]


def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values whose sum depends on the order in which they are added, if the dtype rounds."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 9, shape).to(dtype)
    return of_many_magnitudes(*shape).to(dtype)


def in_slot_order(terms: Sequence[Tensor]) -> Tensor:
    """The sum; 16-bit floats are added in float32 and rounded once."""
    wide = torch.float32 if terms[0].dtype in (torch.float16, torch.bfloat16) else terms[0].dtype
    return reduce(operator.add, [term.to(wide) for term in terms]).to(terms[0].dtype)


def storage(tensor: Tensor) -> int:
    return (tensor._values() if tensor.is_sparse else tensor).untyped_storage().data_ptr()


# Sums


@given(st.data(), CAPS)
def test_sums_run_in_slot_order_to_the_bit(destination: torch.device, data: st.DataObject, cap: int) -> None:
    slots = data.draw(st.integers(2, 5))
    inputs: list[list[Tensor]] = [[] for _ in range(slots)]
    expected = []
    for _ in range(data.draw(st.integers(1, 5))):
        shape = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
        dtype = data.draw(st.sampled_from(DTYPES))
        terms = [made(shape, dtype) for _ in range(slots)]
        forms = data.draw(st.lists(st.sampled_from(DENSE_FORMS), min_size=slots, max_size=slots))
        for on_slot, term, form in zip(inputs, terms, forms, strict=True):
            on_slot.append(FORMS[form](term))
        expected.append(in_slot_order(terms))
    before = [[tensor.clone() for tensor in on_slot] for on_slot in inputs]
    totals = STAR.reduce_add_coalesced(inputs, destination, cap)
    for position, (total, exact) in enumerate(zip(totals, expected, strict=True)):
        assert total.dtype == exact.dtype
        assert total.shape == exact.shape
        assert torch.equal(total.cpu(), exact)
        (alone,) = STAR.reduce_add_coalesced([[on_slot[position]] for on_slot in inputs], destination)
        assert torch.equal(alone.cpu(), exact)
    for on_slot, old in zip(inputs, before, strict=True):
        assert all(map(torch.equal, on_slot, old)), "a sum changed its terms"


@pytest.mark.parametrize("first", ["dense", "expanded"])
def test_an_expanded_term_adds_to_every_element(destination: torch.device, first: str) -> None:
    """The gradient of a sum is expanded, that of another slot's loss may not be."""
    dense, expanded = torch.arange(6.0).view(2, 3), torch.ones(()).expand(2, 3)
    terms = [[dense], [expanded]] if first == "dense" else [[expanded], [dense]]
    (total,) = STAR.reduce_add_coalesced([*terms, [expanded]], destination, 4096)
    assert torch.equal(total.cpu(), dense + 2)
    total[0, 0] = -1.0
    assert total.sum() == (dense + 2).sum() - 3.0


def test_sums_keep_the_strides_of_the_first_slot(destination: torch.device) -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    matrix = torch.randn(3, 4).t()
    totals = STAR.reduce_add_coalesced([[images, matrix], [images, matrix]], destination, 4096)
    assert [total.stride() for total in totals] == [images.stride(), matrix.stride()]


@pytest.mark.parametrize("kinds", ["sss", "ds", "ssd", "sds"])
def test_sparse_terms_add_up_with_dense_ones(destination: torch.device, kinds: str) -> None:
    values = [torch.randn(4, 3, dtype=torch.complex64) * (torch.rand(4, 1) > 0.5) for _ in kinds]
    terms = [value.to_sparse(1) if kind == "s" else value for kind, value in zip(kinds, values, strict=True)]
    dense = [torch.ones(2) for _ in kinds]
    total, beside = STAR.reduce_add_coalesced(
        [list(on_slot) for on_slot in zip(terms, dense, strict=True)], destination, 4096
    )
    assert total.is_sparse == ("d" not in kinds)
    assert total.device == torch.zeros(0, device=destination).device
    torch.testing.assert_close(total.to_dense().cpu(), sum(values))
    assert beside.tolist() == [len(kinds)] * 2


# Broadcast


@given(st.data(), CAPS, st.booleans())
def test_broadcasts_keep_what_tensors_are(elsewhere: torch.device, data: st.DataObject, cap: int, own: bool) -> None:
    slots = data.draw(st.lists(st.sampled_from([CPU, elsewhere]), min_size=1, max_size=4))
    tensors = []
    for _ in range(data.draw(st.integers(0, 6))):
        shape = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
        values = made(shape, data.draw(st.sampled_from(DTYPES)))
        tensors.append(FORMS[data.draw(st.sampled_from(list(FORMS)))](values))
    results = STAR.broadcast_coalesced(tensors, slots, cap, own=own)
    assert [len(on_slot) for on_slot in results] == [len(tensors)] * len(slots)
    for slot, device in enumerate(slots):
        for result, tensor in zip(results[slot], tensors, strict=True):
            if device == CPU and not (own and slot):
                assert result is tensor
                continue
            assert result.dtype == tensor.dtype
            assert result.layout == tensor.layout
            assert isinstance(result, Tagged) == isinstance(tensor, Tagged)
            assert result.__dict__ == tensor.__dict__
            assert torch.equal(result.to_dense().cpu(), tensor.to_dense())
            if not tensor.is_sparse:
                assert strides(result) == strides(tensor.clone())
    for copies in zip(*results, strict=True):
        if (copies[0]._values() if copies[0].is_sparse else copies[0]).numel():
            assert len({*map(storage, copies)}) == len(slots if own else {*slots})


# Scatter and gather


def test_gather_keeps_the_order_of_dimensions(destination: torch.device) -> None:
    parts = [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(3)]
    whole = STAR.gather(parts, 0, destination)
    assert whole.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(whole.cpu(), torch.cat(parts))


def test_gather_keeps_what_tensors_are(destination: torch.device) -> None:
    assert type(STAR.gather([tagged(torch.ones(2)), tagged(torch.ones(1))], 0, destination)) is Tagged
    sparse = STAR.gather([torch.eye(2).to_sparse(), torch.ones(1, 2).to_sparse()], 0, destination)
    assert sparse.is_sparse
    assert sparse.to_dense().tolist() == [[1, 0], [0, 1], [1, 1]]
