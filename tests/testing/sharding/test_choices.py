"""Which tensors are distributed, and in which ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, distribute_tensor
from dataparallel.testing.sharding.converter import can_be_distributed, looks_like_a_tensor, placements_of

pytestmark = pytest.mark.devices("cpu")


class Subclass(Tensor):
    pass


class Like:
    """What no tensor is, and torch's functions take for one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class Liar:
    """It says that it is a tensor."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return Tensor


OTHERS = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "conjugate": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.ones(4, device="meta"),
    "subclass": lambda: torch.ones(4).as_subclass(Subclass),
    "lazy": nn.UninitializedParameter,
    "sharded": lambda: distribute_tensor(torch.ones(4), ["cpu", "cpu"]),
    "like a tensor": Like,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", OTHERS)
def test_what_cannot_be_distributed(kind: str) -> None:
    value = OTHERS[kind]()
    assert looks_like_a_tensor(value)
    assert not can_be_distributed(value)


@pytest.mark.parametrize("value", [torch.ones(()), torch.zeros(0, 3), nn.Parameter(torch.ones(3)), torch.ones(2) > 0])
def test_what_can_be_distributed(value: Tensor) -> None:
    assert can_be_distributed(value)


@pytest.mark.parametrize("value", [1, "text", None, [torch.ones(2)], Tensor, Like.__torch_function__, torch.float32])
def test_what_is_no_tensor(value: Any) -> None:
    assert not looks_like_a_tensor(value)
    assert not can_be_distributed(value)


def test_what_only_says_that_it_is_a_tensor_is_an_error_that_names_its_type() -> None:
    with pytest.raises(TypeError, match=r"type .*\.Liar says that it is a torch\.Tensor"):
        looks_like_a_tensor(Liar())


def placed(*shape: int, parts: tuple[int, ...] = (4,), even_only: bool = False, may_cut: bool = True) -> list[Any]:
    return placements_of(shape, parts, even_only=even_only, may_cut=may_cut)


def test_every_dimension_of_two_rows_or_more_is_cut() -> None:
    assert placed(5, 1, 2) == [(Replicate(),), (Shard(0),), (Shard(2),)]
    assert placed(0, 3) == [(Replicate(),), (Shard(1),)]
    assert placed() == placed(1) == placed(0) == placed(8, may_cut=False) == [(Replicate(),)]


def test_a_mesh_of_two_dimensions_has_a_placement_for_each() -> None:
    both = placed(6, 8, parts=(2, 3))
    assert len(both) == 9
    assert (Shard(0), Shard(0)) in both
    even = placed(6, 8, parts=(2, 3), even_only=True)
    assert (Shard(0), Shard(0)) in even  # 6 rows in 2 x 3 parts
    assert (Replicate(), Shard(1)) not in even
