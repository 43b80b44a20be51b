"""Pointwise operators and reductions: in place, dtypes, what does not fit, and what looks at the whole.

That results are those of plain tensors is in testing/sharding/test_table and in test_every_operator.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.sharded import Replicate, Shard
from sharding import full, sharded


def test_in_place_they_write_to_the_shards_and_return_the_tensor(slots: list) -> None:
    tensor = sharded(torch.rand(5, 2), slots)
    shards, before = tensor.shards, full(tensor)
    assert tensor.mul_(2).add_(tensor) is tensor
    assert all(a is b for a, b in zip(tensor.shards, shards, strict=True))
    assert torch.equal(full(tensor), before * 4)
    out = sharded(torch.zeros(5, 2), slots)
    assert torch.add(tensor, 1, out=out) is out
    assert torch.equal(full(out), full(tensor) + 1)


def test_dtypes_are_promoted_as_for_the_whole(slots: list) -> None:
    whole = torch.arange(4)
    divided = sharded(whole, slots)
    wide = torch.tensor(0.5, dtype=torch.float64)
    assert (divided * wide).dtype == (whole * wide).dtype
    assert (divided / 2).dtype == torch.get_default_dtype()
    zero_dim = sharded(torch.tensor(3), slots)
    assert (zero_dim * wide).dtype == torch.float64
    assert {shard.dtype for shard in (zero_dim * wide).shards} == {torch.float64}


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (
            lambda slots: sharded(torch.rand(4), slots),
            NotImplementedError,
            r"different shapes, \(4, 4\) and \(4,\).*full_tensor",
        ),
        (lambda slots: sharded(torch.rand(4, 4), slots, Shard(1)), ValueError, "different placements"),
        (lambda slots: sharded(torch.rand(4, 4), slots[:2]), ValueError, "different owners"),
        (lambda slots: torch.rand(3, 4), NotImplementedError, r"plain tensor of shape \(3, 4\).*full_tensor"),
        (lambda slots: torch.rand(4, 4).to_sparse(), NotImplementedError, "layout torch.sparse_coo.*full_tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_unchanged(
    slots: list, other: Any, error: type[Exception], words: str
) -> None:
    tensor = sharded(torch.rand(4, 4), slots)
    before = full(tensor)
    other = other(slots)
    for operator in (torch.mul, Tensor.mul_, torch.eq):
        with pytest.raises(error, match=words):
            operator(tensor, other)
    assert torch.equal(full(tensor), before)


@pytest.mark.slots(4)
def test_comparisons_look_at_every_part(on_owners: Callable[[Callable], list]) -> None:
    """So a difference in the part of one machine is seen on all."""
    x, shorter = torch.rand(7, 2), torch.rand(6, 2)
    y = x.clone()
    y[6, 1] += 1

    def compare(owners: Any) -> None:
        divided = sharded(x, owners)
        assert torch.allclose(divided, sharded(x + 1e-12, owners))
        assert not torch.allclose(divided, sharded(y, owners))
        assert torch.equal(divided, sharded(x, owners))
        assert torch.equal(divided, x.to(owners[0]))
        assert not torch.equal(divided, sharded(y, owners))
        assert not torch.equal(divided, sharded(shorter, owners))
        for value in (1.0, 2.0):
            assert torch.equal(sharded(torch.tensor(1.0), owners), sharded(torch.tensor(value), owners)) == (value == 1)

    on_owners(compare)


@pytest.mark.slots(4)
def test_all_machines_get_the_dtype_of_a_0_dim_result(on_owners: Callable[[Callable], list]) -> None:
    """One machine has the element. A shard without it is no 0-dim tensor, for which torch promotes in another way."""
    wide = torch.tensor(0.5, dtype=torch.float64)

    def multiply(owners: Any) -> None:
        factor = wide.to(owners[0])
        number = sharded(torch.tensor(3.0), owners)
        for product in (number * factor, factor * number, *torch._foreach_mul([number], [factor])):
            assert {shard.dtype for shard in product.shards} == {torch.float64}
            assert full(product) == 1.5

    on_owners(multiply)


def test_reductions_of_everything_are_plain_on_the_first_owner(slots: list, root: torch.device) -> None:
    for found in (sharded(torch.ones(5, 2), slots).sum(), sharded(torch.ones(5, 2), slots, Replicate()).norm(1)):
        assert type(found) is torch.Tensor
        assert found.device == root
        assert found == 10


def test_a_number_that_is_nan_anywhere_is_found(slots: list) -> None:
    x = torch.randn(7)
    x[6] = float("nan")
    divided = sharded(x, slots)
    assert divided.isnan().any()
    assert divided.max().isnan()
    assert divided.sum().isnan()
