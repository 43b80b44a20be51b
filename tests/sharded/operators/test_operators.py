"""Operators that no table and no rule knows are refused, in words that say what to do."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Shard, ShardedTensor
from sharding import full, sharded


@pytest.fixture
def parameter(slots: list) -> nn.Parameter:
    return nn.Parameter(sharded(torch.rand(6, 6), slots))


REFUSED: dict[str, Callable[[nn.Parameter], object]] = {
    "aten.add.Tensor": lambda p: p.view(4, 9) + 1,
    "aten.mul_.Tensor": lambda p: p.detach().diagonal().mul_(2),
    "aten.mm.default": lambda p: p @ p,
    "aten.cat.default": lambda p: torch.cat([p, p]),
    "aten.stack.default": lambda p: torch.stack([p, p]),
    "aten._foreach_mm": lambda p: torch._foreach_mm([p], [p]),
    "aten.sum.dim_IntList": lambda p: p.sum(0),
    "aten.native_dropout": lambda p: torch.native_dropout(p, 0.5, True),
    "aten.bernoulli.default": lambda p: p.bernoulli(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(parameter: nn.Parameter, name: str) -> None:
    if name == "aten._foreach_mm" and not hasattr(torch, "_foreach_mm"):
        pytest.skip(f"torch {torch.__version__} has no _foreach_mm")
    with pytest.raises(NotImplementedError, match=rf"{name}.* does not work on sharded tensors.*full_tensor\(\)"):
        REFUSED[name](parameter)


def test_comparisons_with_other_shapes_are_no_comparisons_of_objects(parameter: nn.Parameter) -> None:
    """Python would say False for == and True for != if it were left to it."""
    for other in (torch.rand(2, 6, 6), sharded(torch.rand(6), parameter.devices)):  # type: ignore[attr-defined]
        for compare in (lambda a, b: a == b, lambda a, b: a != b):
            for pair in ((parameter, other), (other, parameter)):
                with pytest.raises(NotImplementedError, match="full_tensor"):
                    compare(*pair)


def test_a_plain_tensor_is_divided_by_a_sharded_one_to_the_bit(slots: list) -> None:
    """Not by way of the reciprocal, which Python's reflected operator takes for numbers."""
    a, b = torch.rand(50, 3), torch.rand(50, 3)
    assert torch.equal(full(a / sharded(b, slots)), a / b)
    assert torch.equal(full(3 / sharded(b, slots)), 3 / b)


def test_under_inference_mode_operators_that_torch_makes_of_others_work(slots: list) -> None:
    x = torch.rand(6, 3)
    with torch.inference_mode():
        divided = ShardedTensor(sharded(x, slots).shards, Shard(0), x.shape)
        assert torch.equal(full(torch.square(divided)), x.square())
        assert bool(torch.allclose(divided, divided + 1e-12))
        with pytest.raises(NotImplementedError, match="full_tensor"):
            divided.cumsum(0)


def test_a_plain_tensor_is_not_written_to(slots: list) -> None:
    plain: Tensor = torch.zeros(6, 3)
    other = sharded(torch.ones(6, 3), slots)
    for write in (
        lambda: torch.add(other, 1, out=plain),
        lambda: torch._foreach_add_([plain], [other]),
        lambda: plain.bernoulli_(other),
    ):
        with pytest.raises(NotImplementedError, match="full_tensor"):
            write()
    with pytest.raises(NotImplementedError, match=r"add_.*full_tensor"):
        plain.add_(other)
    assert torch.equal(plain, torch.zeros(6, 3))


@pytest.mark.parametrize(
    "name",
    ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift"],
)
def test_a_plain_name_is_not_bound_to_a_sharded_result(slots: list, root: torch.device, name: str) -> None:
    """Python computes ``plain = plain + other`` where the method for ``plain += other`` is not implemented."""
    is_for_bits = name in ("iand", "ior", "ixor", "ilshift", "irshift")
    whole = torch.arange(1, 19, dtype=torch.int64 if is_for_bits else torch.float64).reshape(6, 3)
    plain, other = whole.to(root, copy=True), sharded(whole, slots)
    with pytest.raises(NotImplementedError, match="full_tensor"):
        getattr(operator, name)(plain, other)
    assert torch.equal(plain.cpu(), whole)
