"""Full parameters have their values after a pull and a copy, and no memory once they are freed."""

import pytest
import torch

from dataparallel import _torch
from dataparallel.sharded.placements import Shard
from dataparallel.sharded.units.buffers import FullBuffer, Layout

SHAPES = [torch.Size([5, 3]), torch.Size([]), torch.Size([2])]


@pytest.fixture
def full(root):
    return FullBuffer(Layout(SHAPES, [Shard(0)] * len(SHAPES), 2), torch.float64, torch.device(root))


def fill(full: FullBuffer) -> list[torch.Tensor]:
    """Fills it with numbers, and returns the parameters that they are."""
    values = [torch.randn(shape, dtype=torch.float64, device=full.tensors[0].device) for shape in SHAPES]
    pieces = []
    for owner in range(2):
        pieces.append(torch.zeros(full.layout.numel, dtype=torch.float64, device=values[0].device))
        parts = full.layout.parts_of(pieces[-1], owner)
        for part, value in zip(parts, values, strict=True):
            rows = value.reshape(-1, *value.shape[1:]) if value.dim() else value.reshape(1)
            part.reshape(-1).copy_(rows.tensor_split([(len(rows) + 1) // 2])[owner].reshape(-1))
    full.pull(pieces, first=1)
    full.fill()
    return values


def test_it_has_the_values_of_all_pieces(full):
    for _ in range(2):
        for found, expected in zip(full.tensors, fill(full), strict=True):
            assert torch.equal(found, expected)
        assert full.gathered is None
        full.free()


def test_a_free_one_has_no_bytes(full):
    assert full.tensors[0].untyped_storage().nbytes() == 0
    fill(full)
    assert full.tensors[0].untyped_storage().nbytes() > 0
    full.free()
    assert full.tensors[0].untyped_storage().nbytes() == 0


def test_memory_that_forward_has_given_to_a_parameter_goes_too(full):
    for _ in range(2):
        values = fill(full)
        moved = full.tensors[0]
        moved.data = moved.data + 1
        full.free()
        assert moved.untyped_storage().nbytes() == 0
        fill(full)
        assert moved.shape == values[0].shape
        assert moved.untyped_storage()._cdata == full.tensors[1].untyped_storage()._cdata
        full.free()


@pytest.mark.skipif(not _torch.set_versions, reason="this torch cannot set versions")
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
