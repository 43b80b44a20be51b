"""Operators on lists make one call for each owner, and give what they give on lists of plain tensors."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from dataparallel.sharded import Replicate, Shard, ShardedTensor
from dataparallel.sharded.operators.lists import on_lists
from sharding import full, sharded

aten = torch.ops.aten


class Counted:
    """An operator that counts its calls on plain tensors."""

    def __init__(self, func: Any) -> None:
        self.func = func
        self.lengths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.lengths.append(len(args[0]))
        return self.func(*args, **kwargs)


@pytest.mark.parametrize("func", [aten._foreach_add_.List, aten._foreach_mul.List])
def test_one_call_for_each_owner(slots: list, func: Any) -> None:
    tensors = [sharded(torch.ones(6, 2), slots) for _ in range(20)]
    counted: Any = Counted(func)
    on_lists(counted, tensors, tensors)
    assert counted.lengths == [20] * len(slots)


def whole(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.rand(shape).to(dtype) + 1 for shape in [(7, 2), (2, 3), (1,), (), (3, 5)]]


def divided(tensors: list[torch.Tensor], slots: list) -> list[torch.Tensor]:
    """Each in another way; the third stays plain."""
    placements = [Shard(0), Shard(0), None, Shard(0), Replicate()]
    return [
        tensor.to(slots[0]) if placement is None else sharded(tensor, slots, placement)
        for tensor, placement in zip(tensors, placements, strict=True)
    ]


CALLS: dict[str, Any] = {
    "scalar": lambda t: torch._foreach_mul(t, 3),
    "scalars": lambda t: torch._foreach_sub(t, [1.0, 2.0, 3.0, 4.0, 5.0]),
    "list": lambda t: torch._foreach_add(t, t, alpha=0.5),
    "a 0-dim one of the list": lambda t: torch._foreach_mul(t[:2], t[3]),
    "tensor": lambda t: torch._foreach_mul(t, torch.tensor(2.0, dtype=torch.float64, device=t[0].device)),
    "tensors of one element": lambda t: torch._foreach_addcmul(
        t, t, [torch.tensor(float(i), dtype=torch.float64, device=t[0].device) for i in range(5)]
    ),
    "power": lambda t: torch._foreach_pow(2.0, t),
    "lerp": lambda t: torch._foreach_lerp(t, torch._foreach_mul(t, 2), 0.3),
    "lerp by list": lambda t: torch._foreach_lerp(t, torch._foreach_mul(t, 2), t),
    "maximum": lambda t: torch._foreach_maximum(t, 1.5),
    "sqrt": torch._foreach_sqrt,
    "norm": torch._foreach_norm,
    **{f"norm {order}": partial(torch._foreach_norm, ord=order) for order in (1, math.inf, -math.inf, 0, -1)},
}


@pytest.mark.parametrize("name", CALLS)
def test_results_equal_those_of_plain_lists(slots: list, name: str) -> None:
    """Of sharded tensors with empty parts, a 0-dim one, a replicated one, and a plain one."""
    expected = CALLS[name](whole())
    got = CALLS[name](divided(whole(), slots))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(full(one), other, rtol=1e-14, atol=1e-14)
        assert isinstance(one, ShardedTensor) or one.device == torch.device(slots[0])


@pytest.mark.parametrize("places", [[False], [True, False]], ids=["a plain list", "a list of both"])
def test_a_sharded_number_serves_every_list(slots: list, places: list) -> None:
    number = sharded(torch.tensor(2.0), slots)
    tensors = [sharded(torch.ones(3), slots) if is_sharded else torch.ones(3, device=slots[0]) for is_sharded in places]
    for got in torch._foreach_mul(tensors, number):
        assert torch.equal(full(got), torch.full((3,), 2.0))
    torch._foreach_add_(tensors, number, alpha=3)
    assert all(torch.equal(full(tensor), torch.full((3,), 7.0)) for tensor in tensors)


def test_what_a_plain_list_cannot_take_is_an_error(slots: list) -> None:
    ones = [torch.ones(3, device=slots[0])]
    for numbers in (torch.ones(2), sharded(torch.ones(2), slots)):
        with pytest.raises(NotImplementedError, match=r"_foreach_addcmul_.*full_tensor\(\)"):
            torch._foreach_addcmul_([sharded(torch.ones(3), slots), *ones], [*ones, *ones], [*ones, *ones], numbers)
        assert torch.equal(ones[0].cpu(), torch.ones(3))
    with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
        torch._amp_foreach_non_finite_check_and_unscale_(ones, sharded(torch.zeros(1), slots), ones[0][:1])
    with pytest.raises(RuntimeError, match="at least one tensor"):
        torch._foreach_mul([], sharded(torch.tensor(2.0), slots))


def test_in_place_they_write_to_the_shards(slots: list) -> None:
    tensors, sources = divided(whole(), slots), divided([t * 2 for t in whole()], slots)
    shards = [tensor.shards for tensor in tensors if isinstance(tensor, ShardedTensor)]
    torch._foreach_copy_(tensors, sources)
    torch._foreach_addcdiv_(tensors, sources, sources, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert shards == [tensor.shards for tensor in tensors if isinstance(tensor, ShardedTensor)]
    for i, (tensor, before) in enumerate(zip(tensors, whole(), strict=True)):
        torch.testing.assert_close(full(tensor), before * 2 + i + 1, rtol=1e-14, atol=1e-14)
    torch._foreach_zero_(tensors)
    assert all(not full(tensor).any() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_16_bits_are_rounded_once(slots: list, dtype: torch.dtype) -> None:
    whole = torch.full((1000, 3), 0.7).to(dtype)
    (got,) = torch._foreach_norm([sharded(whole, slots)])
    assert got.dtype == dtype
    assert torch.equal(full(got), whole.double().norm().to(dtype))


def test_wrong_lists_change_nothing(slots: list) -> None:
    tensors = [sharded(torch.ones(4, 2), slots) for _ in range(3)]
    others = [*(sharded(torch.ones(4, 2), slots) for _ in range(2)), sharded(torch.ones(5, 2), slots)]
    with pytest.raises(NotImplementedError, match="different shapes"):
        torch._foreach_add_(tensors, others)
    assert all(torch.equal(full(tensor), torch.ones(4, 2)) for tensor in tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: torch._foreach_mul_(tensors, 2),
        lambda tensors: torch._foreach_add_(tensors, tensors),
        lambda tensors: torch._foreach_zero_(tensors),
        lambda tensors: torch._foreach_copy_(tensors, [torch.ones_like(tensor) for tensor in tensors]),
    ],
    ids=["mul", "add", "zero", "copy"],
)
def test_versions_grow_with_each_change_in_place(slots: list, change: Any) -> None:
    """Who keeps values, such as units that stay gathered, sees by the version that they have changed."""
    tensors = [sharded(torch.ones(6, 2), slots) for _ in range(2)]
    before = [tensor._version for tensor in tensors]
    change(tensors)
    assert [tensor._version for tensor in tensors] == [version + 1 for version in before]


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_versions_of_parameters_grow_with_each_step(slots: list, optimizer: Any, how: Any) -> None:
    parameter = torch.nn.Parameter(sharded(torch.ones(6, 2), slots))
    parameter.grad = sharded(torch.ones(6, 2), slots)
    before, before_of_grad = parameter._version, parameter.grad._version
    optimizer([parameter], lr=0.1, **how).step()
    assert parameter._version > before
    assert parameter.grad._version == before_of_grad
