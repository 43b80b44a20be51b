"""A layout loses nothing on the way to slots or to owners, and a full buffer has no memory once it is freed."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from dataparallel.sharded.placements import Shard
from dataparallel.sharded.units.gather import FullBuffer
from dataparallel.sharded.units.unit import Layout


@st.composite
def shapes_and_cuts(draw: Any, owners: int) -> tuple[torch.Size, Shard]:
    """0-dim, empty, uneven, fewer rows than owners; a dimension other than 0 is a multiple of the owners."""
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    dim = draw(st.integers(0, max(len(shape) - 1, 0)))
    if dim:
        shape[dim] = owners * draw(st.integers(0, 3))
    return torch.Size(shape), Shard(dim)


@st.composite
def layouts(draw: Any) -> tuple[Layout, list[Tensor]]:
    """A layout and parameters with distinct values."""
    owners = draw(st.integers(1, 5))
    drawn = draw(st.lists(shapes_and_cuts(owners), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.int64]))
    layout = Layout([shape for shape, _ in drawn], [cut for _, cut in drawn], owners)
    parameters, last = [], 1
    for shape, _ in drawn:
        parameters.append(torch.arange(last, last + shape.numel(), dtype=dtype).view(shape))
        last += shape.numel()
    return layout, parameters


def parts(layout: Layout, whole: Tensor, at: int) -> list[Tensor]:
    """The parts of a parameter or a gradient as `torch.chunk` cuts it, one for each owner."""
    if whole.dim() == 0:
        return [whole, *[whole.new_empty(0)] * (layout.owners - 1)]
    place = layout.columns[at]
    found = [*whole.chunk(layout.owners, place.dim)]
    return found + [whole.narrow(place.dim, 0, 0)] * (layout.owners - len(found))


def full_parameters(layout: Layout, full: Tensor) -> list[Tensor]:
    return [
        full[offset : offset + place.shape.numel()].view(place.shape)
        for place, offset in zip(layout.columns, layout.full_offsets, strict=True)
    ]


def packed(layout: Layout, values: list[Tensor]) -> Tensor:
    """The gathered matrix. What belongs to no parameter is -1."""
    gathered = values[0].new_full((layout.owners, layout.numel), -1)
    for owner in range(layout.owners):
        layout.pack(gathered[owner], [parts(layout, value, at)[owner] for at, value in enumerate(values)], owner)
    return gathered


def assert_all_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.devices("cpu")
class TestParameters:
    @given(layouts())
    def test_that_are_packed_and_gathered_are_the_same(self, drawn):
        layout, parameters = drawn
        full = parameters[0].new_full((layout.owners * layout.numel,), -2)
        layout.copy_out(packed(layout, parameters), full)
        assert_all_equal(full_parameters(layout, full), parameters)

    @given(layouts())
    def test_lie_apart_and_begin_where_kernels_read_16_bytes(self, drawn):
        layout, _ = drawn
        free = 0
        for place, offset in zip(layout.columns, layout.full_offsets, strict=True):
            assert place.start == free
            assert place.start * 2 % 16 == 0
            assert offset + place.shape.numel() <= layout.owners * (place.start + place.numel)
            free = place.start + place.numel + place.padding
        assert layout.numel == free


@pytest.mark.devices("cpu")
@given(layouts(), st.sampled_from([2, 3]))
def test_over_machines_an_owner_has_every_so_many_rows(drawn, machines):
    """Those of one owner follow each other, and all machines together have what one machine with as many owners has."""
    alone, values = drawn
    owners = alone.owners
    shapes = [place.shape for place in alone.columns]
    cuts = [Shard(0)] * len(shapes)
    of_all = Layout(shapes, cuts, owners * machines)
    gathered = packed(of_all, values)
    for machine in range(machines):
        layout = Layout(shapes, cuts, owners, machines=machines, machine=machine)
        assert (layout.owners, layout.numel) == (of_all.owners, of_all.numel)
        for owner in range(owners):
            row = gathered[owner * machines + machine]
            assert_all_equal(layout.parts_of(row, owner), of_all.parts_of(row, owner * machines + machine))


@pytest.mark.devices("cpu")
class TestGradients:
    @given(layouts(), st.data())
    def test_arrive_at_their_owners_and_nothing_else_does(self, drawn, data):
        layout, values = drawn
        grads: list[Tensor | None] = [value if data.draw(st.booleans()) else None for value in values]
        gathered = values[0].new_full((layout.owners, layout.numel), -1)
        layout.copy_in(grads, gathered)
        expected = torch.zeros_like(gathered)
        for owner in range(layout.owners):
            for at, view in enumerate(layout.parts_of(expected[owner], owner)):
                if grads[at] is not None:
                    view.copy_(parts(layout, values[at], at)[owner])
        torch.testing.assert_close(gathered, expected, rtol=0, atol=0)

    @pytest.mark.parametrize("rows", [4, 5], ids=["even", "uneven"])
    @pytest.mark.parametrize("is_turned", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_of_other_strides_are_cast_on_the_way(self, rows, is_turned, dtype):
        grad = torch.arange(3.0 * rows).view(3, rows).t() if is_turned else torch.arange(3.0 * rows).view(rows, 3)
        layout = Layout([grad.shape], [Shard(0)], 2)
        gathered = torch.full((2, layout.numel), -1, dtype=dtype)
        layout.copy_in([grad], gathered)
        expected = torch.zeros_like(gathered)
        for owner, part in enumerate(grad.chunk(2)):
            expected[owner, : part.numel()] = part.reshape(-1)
        assert torch.equal(gathered, expected)


SHAPES = [torch.Size([5, 3]), torch.Size([]), torch.Size([2])]


@pytest.fixture
def full(root):
    return FullBuffer(Layout(SHAPES, [Shard(0)] * len(SHAPES), 2), torch.float64, torch.device(root))


def fill(full: FullBuffer) -> list[Tensor]:
    """Fills it with numbers, and returns the parameters that they are."""
    values = [torch.randn(shape, dtype=torch.float64, device=full.tensors[0].device) for shape in SHAPES]
    pieces = []
    for owner in range(2):
        pieces.append(torch.zeros(full.layout.numel, dtype=torch.float64, device=values[0].device))
        parts = full.layout.parts_of(pieces[-1], owner)
        for part, value in zip(parts, values, strict=True):
            rows = value.reshape(-1, *value.shape[1:]) if value.dim() else value.reshape(1)
            part.reshape(-1).copy_(rows.tensor_split([(len(rows) + 1) // 2])[owner].reshape(-1))
    full.pull(pieces, 1, full.layout)
    full.fill()
    return values


def test_it_has_the_values_of_all_pieces_and_no_bytes_once_it_is_free(full):
    for _ in range(2):
        assert full.tensors[0].untyped_storage().nbytes() == 0
        for found, expected in zip(full.tensors, fill(full), strict=True):
            assert torch.equal(found, expected)
        assert full.gathered is None
        full.free()
    assert full.tensors[0].untyped_storage().nbytes() == 0


def test_autograd_refuses_to_read_a_free_one_and_reads_it_once_it_is_full_again(full):
    fill(full)
    x = torch.ones(3, dtype=torch.float64, device=full.tensors[0].device, requires_grad=True)
    first, second = (full.tensors[0] @ x for _ in range(2))
    full.free()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()
    fill(full)
    second.sum().backward()
    torch.testing.assert_close(x.grad, full.tensors[0].sum(0))
