"""How a tensor is divided: the parts are those of ``torch.chunk``."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.sharded import Shard
from dataparallel.sharded.placements import check_placement, shard_shapes

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@given(st.data())
def test_parts_are_those_of_torch_chunk(data: st.DataObject) -> None:
    """Where chunk makes fewer than asked for, the last parts are empty."""
    shape = data.draw(shapes)
    dim = data.draw(st.integers(0, len(shape) - 1))
    parts = data.draw(st.integers(1, 12))
    chunks = [chunk.shape for chunk in torch.zeros(shape).chunk(parts, dim)]
    found = shard_shapes(shape, Shard(dim), parts)
    assert len(found) == parts
    if shape[dim]:
        empty = torch.Size([*shape[:dim], 0, *shape[dim + 1 :]])
        assert found == chunks + [empty] * (parts - len(chunks))
    else:  # chunk makes as many empty ones as it is asked for
        assert found == [torch.Size(shape)] * parts


def test_the_first_device_owns_a_0_dim_tensor() -> None:
    assert shard_shapes((), Shard(0), 3) == [torch.Size(()), torch.Size((0,)), torch.Size((0,))]


@given(st.data())
def test_a_negative_dimension_counts_from_the_end(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    assert check_placement(Shard(dim), shape) == Shard(dim % len(shape))


def test_a_0_dim_tensor_has_dimension_0_only() -> None:
    assert check_placement(Shard(0), ()) == check_placement(Shard(-1), ()) == Shard(0)
    with pytest.raises(ValueError, match="no such dimension"):
        check_placement(Shard(1), ())
