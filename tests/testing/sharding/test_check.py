"""`check_op` finds what an operator does otherwise on distributed tensors, and says for which placements."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Shard, ShardedTensor, operators
from dataparallel.sharded.operators.pointwise import pointwise
from dataparallel.testing import OperatorDiffers, Rank, check_op
from dataparallel.testing.ranks import on_threads

pytestmark = pytest.mark.usefixtures("gathers_are_errors")

aten = torch.ops.aten


def normal(*shape: int, requires_grad: bool = False) -> Tensor:
    made = torch.randn(shape or (5, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return made.requires_grad_(requires_grad)


def counts(checked: Any) -> tuple[int, int, int]:
    return checked.right, checked.refused, checked.wrong


def wrong(*args: Any, **kwargs: Any) -> str:
    """The message of the error, without its first line."""
    with pytest.raises(OperatorDiffers) as caught:
        check_op(*args, **kwargs)
    first, *lines = str(caught.value).split("\n")
    assert f"in {len(lines)} of " in first
    assert caught.value.checked.wrong == len(lines)
    return "\n".join(lines)


# ---- what is right or refused ----------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("gradients", [False, True])
def test_operators_that_are_right(slots: list, gradients: bool) -> None:
    x, y = normal(requires_grad=True), nn.Parameter(normal(5, 4) + 3)
    assert counts(check_op(torch.exp, x, devices=slots, gradients=gradients)) == (3, 0, 0)
    assert counts(check_op(torch.mul, x, y, devices=slots, gradients=gradients)) == (3, 6, 0)
    assert counts(check_op(torch.sum, x, devices=slots, gradients=gradients)) == (3, 0, 0)
    assert counts(check_op(torch._foreach_mul, [x], 2.0, devices=slots, gradients=gradients)) == (3, 0, 0)
    assert counts(check_op(torch.mul, x, x, devices=slots, gradients=gradients)) == (3, 0, 0)
    assert counts(check_op(torch.sqrt, normal(), devices=slots)) == (3, 0, 0)  # NaNs


def test_refusals_are_counted_and_shown(slots: list) -> None:
    checked = check_op(torch.matmul, normal(3, 4), normal(4, 2), devices=slots)
    assert counts(checked) == (0, 9, 0)
    assert "args[0] Shard(1), args[1] Replicate(): NotImplementedError: aten.mm.default" in checked.refusals[6]
    checked = check_op(torch.add, normal(), normal(), devices=slots)
    assert counts(checked) == (3, 6, 0)
    assert all("placements" in refusal for refusal in checked.refusals)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def test_a_wrong_kernel_is_found_with_the_placements_that_show_it(slots: list, monkeypatch: Any) -> None:

    def planted(func: Any, *args: Any, **kwargs: Any) -> Any:
        result = pointwise(func, *args, **kwargs)
        if result.placement == Shard(1):
            result.shards[1].add_(1e-6)
        return result

    monkeypatch.setitem(operators.TABLE, aten.exp.default, planted)
    found = wrong(torch.exp, normal(), devices=slots)
    assert found.startswith("  args[0] Shard(1): result has other values: ")
    assert "\n" not in found


def test_a_wrong_gradient_is_found(slots: list, monkeypatch: Any) -> None:

    def twice(func: Any, *args: Any, **kwargs: Any) -> Any:
        result = pointwise(func, *args, **kwargs)
        if result.placement == Shard(0):
            result.shards[0].mul_(2)
        return result

    x = normal(requires_grad=True)
    monkeypatch.setitem(operators.TABLE, aten.mul.Tensor, twice)
    assert check_op(torch.exp, x, devices=slots).right == 3
    found = wrong(torch.exp, x, devices=slots, gradients=True)  # its backward multiplies
    assert found.startswith("  args[0] Shard(0): the gradient of args[0] has other values")


def on_sharded(other: Callable[..., Any], right: Callable[..., Any] = torch.exp) -> Callable[..., Any]:
    """An operator that does something else on sharded tensors."""

    def op(x: Tensor, *args: Any) -> Any:
        return (other if isinstance(x, ShardedTensor) else right)(x, *args)

    return op


def spoil(x: ShardedTensor, y: ShardedTensor) -> Tensor:
    result = x + x
    y.shards[0].zero_()
    return result


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        (on_sharded(lambda x: x.exp().float()), 1, "result has the dtype torch.float32, expected torch.float64"),
        (on_sharded(lambda x: x.sum()), 1, r"result has the shape \(\), expected \(5, 4\)"),
        (on_sharded(lambda x: None), 1, r"result is None, expected a tensor of shape \(5, 4\)"),
        (on_sharded(lambda x: {"a": x.exp()}, lambda x: {"b": x.exp()}), 1, r"""has \['result\["a"\]'\], expected"""),
        (
            on_sharded(lambda x: [x.exp(), (1, x * 2)], lambda x: [x.exp(), (1, x * 3)]),
            1,
            r"result\[1\]\[1\] has other",
        ),
        (on_sharded(lambda x: 1.0, lambda x: 1.0 + 1e-6), 1, "result is 1.0, expected 1.000001"),
        (on_sharded(lambda x: x.clone(), lambda x: x), 1, r"result is a new tensor, expected args\[0\]"),
        (on_sharded(lambda x, y: x.exp(), lambda x, y: y.copy_(x).exp()), 2, r"args\[1\], which is written to, has"),
        (on_sharded(spoil, lambda x, y: x + x), 2, r"args\[1\] has been written to, and is only read"),
        (on_sharded(lambda x: 1 / 0), 1, "ZeroDivisionError: division by zero"),
        (on_sharded(lambda x: torch.ones(2) @ torch.ones(3)), 1, "RuntimeError: .*size"),
    ],
)
def test_differences_and_errors_are_found(op: Any, args: int, message: str) -> None:
    tensors = [normal() + place for place in range(args)]
    with pytest.raises(OperatorDiffers, match=message) as caught:
        check_op(op, *tensors, devices=["cpu", "cpu"])
    assert caught.value.checked.right == 0
    assert caught.value.checked.wrong == 3**args


# ---- what cannot be checked ------------------------------------------------------------------------------------------


def test_there_must_be_something_to_check() -> None:
    with pytest.raises(ValueError, match=r"no tensor that can be distributed.*got Tensor, int"):
        check_op(torch.add, torch.eye(2).to_sparse(), 1, devices=["cpu"])
    with pytest.raises(ValueError, match="no argument requires one"):
        check_op(torch.exp, normal(), devices=["cpu"], gradients=True)
    with pytest.raises(ValueError, match="nothing that it returns requires one"):
        check_op(torch.isnan, normal(requires_grad=True), devices=["cpu"], gradients=True)


def test_an_operator_that_differs_from_call_to_call_is_an_error() -> None:
    numbers = itertools.count()
    with pytest.raises(ValueError, match="something else in each call, although every call starts with the same seed"):
        check_op(lambda x: x + next(numbers), normal(), devices=["cpu"])


def test_errors_of_plain_tensors_are_raised_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        check_op(torch.mm, normal(2, 3), normal(2, 3), devices=["cpu"])


# ---- DTensors --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("dataparallel_tests::reversed_rows", mutates_args=())
def reversed_rows(x: Tensor) -> Tensor:
    return x.flip(0)


@reversed_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _wrong_rule(rank: Rank) -> str:
    return wrong(torch.ops.dataparallel_tests.reversed_rows.default, normal(), devices=rank.mesh())


@pytest.mark.devices("cpu")
def test_a_wrong_sharding_rule_is_found_with_the_placements_that_show_it() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.dataparallel_tests.reversed_rows.default)
    def rule(x: Any) -> Any:
        return [([placement], [placement]) for placement in (Replicate(), Shard(0), Shard(1))]

    for found in on_threads(_wrong_rule, ranks=2):
        assert found.startswith("  args[0] Shard(0): result has other values")
        assert "\n" not in found


def _fails_on_one(rank: Rank) -> str:
    from torch.distributed.tensor import DTensor

    def op(x: Tensor) -> Tensor:
        if isinstance(x, DTensor) and x.placements == (Shard(1),) and rank.number == 1:
            raise KeyError("planted")
        return x + 1

    return wrong(op, normal(), devices=rank.mesh())


@pytest.mark.devices("cpu")
def test_all_ranks_know_what_one_has_seen() -> None:
    for found in on_threads(_fails_on_one, ranks=2):
        assert found == "  args[0] Shard(1): rank 0: nothing wrong, rank 1: KeyError: 'planted'"
