"""How a tensor is divided: the parts are those of ``torch.chunk``, and placements are torch's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import tensor as torch_placements

from dataparallel.sharded import Replicate, Shard
from dataparallel.sharded.placements import check_placement, rows_of_shards, shard_shapes

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


@given(st.integers(0, 100), st.integers(1, 12))
def test_rows_add_up(rows: int, parts: int) -> None:
    found = rows_of_shards(rows, parts)
    assert sum(found) == rows
    assert found == sorted(found, reverse=True)


@given(shapes, st.integers(1, 5))
def test_replicated_parts_are_the_whole(shape: list[int], parts: int) -> None:
    assert shard_shapes(shape, Replicate(), parts) == [torch.Size(shape)] * parts


def test_the_first_device_owns_a_0_dim_tensor() -> None:
    assert shard_shapes((), Shard(0), 3) == [torch.Size(()), torch.Size((0,)), torch.Size((0,))]
    assert shard_shapes((), Replicate(), 2) == [torch.Size(())] * 2


def test_they_equal_torchs() -> None:
    assert Shard is torch_placements.Shard
    assert Replicate is torch_placements.Replicate
    assert {Shard(1): "a", Replicate(): "b"}[torch_placements.Shard(1)] == "a"
    assert Shard(0) != Shard(1)
    assert Shard(0) != Replicate()


@given(st.data())
def test_a_negative_dimension_counts_from_the_end(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    assert check_placement(Shard(dim), shape) == Shard(dim % len(shape))


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_that_is_not_there(dim: int) -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 4\).*no such dimension"):
        check_placement(Shard(dim), (3, 4))


def test_a_0_dim_tensor_has_dimension_0_only() -> None:
    assert check_placement(Shard(0), ()) == check_placement(Shard(-1), ()) == Shard(0)
    with pytest.raises(ValueError, match="no such dimension"):
        check_placement(Shard(1), ())


@pytest.mark.parametrize("placement", [0, None, "Shard(0)", torch_placements.Partial(), Shard])
def test_other_placements_are_refused(placement: object) -> None:
    with pytest.raises(TypeError, match=r"Shard\(dim\) or Replicate\(\)"):
        check_placement(placement, (3, 4))
