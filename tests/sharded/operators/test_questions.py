"""What is asked of the whole is answered for the whole."""

import torch

from sharding import sharded


def test_equal_looks_at_every_part(slots: list) -> None:
    x = torch.rand(7, 2)
    y = x.clone()
    y[6, 1] += 1
    assert torch.equal(sharded(x, slots), sharded(x, slots))
    assert torch.equal(sharded(x, slots), x.to(slots[0]))
    assert not torch.equal(sharded(x, slots), sharded(y, slots))
    assert not torch.equal(sharded(x, slots), sharded(torch.rand(6, 2), slots))
    assert not torch.equal(sharded(torch.tensor(1.0), slots), sharded(torch.tensor(2.0), slots))


def test_allclose_looks_at_every_part(slots: list) -> None:
    x = torch.rand(7, 2)
    y = x.clone()
    y[6, 1] += 1
    assert torch.allclose(sharded(x, slots), sharded(x + 1e-12, slots))
    assert not torch.allclose(sharded(x, slots), sharded(y, slots))


def test_sizes_are_those_of_the_whole(slots: list) -> None:
    x = sharded(torch.rand(7, 2), slots)
    assert torch.ops.aten.is_same_size(x, torch.rand(7, 2))
    assert not torch.ops.aten.is_same_size(x, torch.rand(2, 7))
