"""`ShardingConverter` gives the arguments of a call in every combination of placements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, ShardedTensor, distribute_tensor
from dataparallel.testing import Rank, ShardingConverter
from dataparallel.testing.ranks import on_threads


def test_every_combination_comes_once(slots: list) -> None:
    x, y = torch.randn(5, 8), torch.randn(7)
    converter = ShardingConverter((x, 2), {"other": y}, slots)
    seen = []
    for args, kwargs in converter:
        assert type(args[0]) is type(kwargs["other"]) is ShardedTensor
        assert args[1] == 2
        assert torch.equal(args[0].full_tensor("cpu"), x)
        assert torch.equal(kwargs["other"].full_tensor("cpu"), y)
        assert args[0].devices == tuple(torch.device(slot) for slot in slots)
        seen.append((args[0].placement, kwargs["other"].placement))
        assert converter.combination == {"args[0]": (seen[-1][0],), "other": (seen[-1][1],)}
    first, second = (Replicate(), Shard(0), Shard(1)), (Replicate(), Shard(0))
    assert seen == [(one, other) for one in first for other in second]
    assert (converter.hit, converter.miss, converter.successful()) == (12, 0, True)


@dataclass(frozen=True)
class Batch:
    x: Tensor
    name: str
    rest: dict[str, Any]


def test_tensors_are_found_in_nested_arguments() -> None:
    options = {"alpha": 2}
    batch = Batch(torch.ones(4), "a", {"y": [torch.zeros(3), None], "z": options})
    converter = ShardingConverter(([batch],), {"options": options}, ["cpu", "cpu"])
    for ((found,),), kwargs in converter:
        assert type(found) is Batch
        assert type(found.x) is type(found.rest["y"][0]) is ShardedTensor
        assert found.rest["y"][1] is None
        assert found.rest["z"] is options
        assert kwargs["options"] is options
    assert [*converter.combination] == ["args[0][0].x", 'args[0][0].rest["y"][0]']
    assert converter.hit == 8
    assert type(batch.x) is Tensor


def test_parameters_stay_parameters(slots: list) -> None:
    frozen, weight = nn.Parameter(torch.ones(4), requires_grad=False), nn.Parameter(torch.ones(4))
    inner = torch.ones(4, requires_grad=True) * 2
    for (first, second, third, fourth), _ in ShardingConverter((frozen, weight, inner, torch.ones(4)), {}, slots):
        assert isinstance(first, nn.Parameter)
        assert isinstance(second, nn.Parameter)
        assert not isinstance(third, nn.Parameter)
        assert [each.requires_grad for each in (first, second, third, fourth)] == [False, True, True, False]
        assert third.is_leaf


def test_one_tensor_in_two_places_stays_one() -> None:
    x = torch.ones(4)
    converter = ShardingConverter((x, [x]), {"out": x}, ["cpu", "cpu"])
    for (first, (second,)), kwargs in converter:
        assert first is second is kwargs["out"]
        assert [*converter.combination] == ["args[0] is args[1][0] is out"]
    assert converter.hit == 6


class Subclass(Tensor):
    pass


class Like:
    """What no tensor is, and torch's functions take for one."""

    __torch_function__ = Tensor.__torch_function__


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
def test_what_cannot_be_distributed_is_passed_as_it_is_and_counted(kind: str) -> None:
    value = OTHERS[kind]()
    converter = ShardingConverter((torch.ones(4), value), {"size": 3}, ["cpu", "cpu"])
    for args, kwargs in converter:
        assert args[1] is value
        assert kwargs == {"size": 3}
    assert (converter.hit, converter.miss, converter.successful()) == (2, 2, False)


def test_what_only_says_that_it_is_a_tensor_is_an_error_that_names_its_type() -> None:
    class Liar:
        __class__ = Tensor  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"Liar says that it is a torch\.Tensor"):
        ShardingConverter(([Liar()],), {}, ["cpu"])


@pytest.mark.parametrize(
    ("shape", "even_only", "dims"),
    [((5, 1, 2), False, [0, 2]), ((0, 3), False, [1]), ((1,), False, []), ((), False, []), ((5, 8, 4), True, [1, 2])],
)
def test_every_dimension_of_two_rows_or_more_is_cut(shape: tuple[int, ...], even_only: bool, dims: list[int]) -> None:
    converter = ShardingConverter((torch.ones(shape),), {}, ["cpu"] * 4, even_only=even_only)
    seen = [converter.combination["args[0]"] for _ in converter]
    assert seen == [(Replicate(),), *((Shard(dim),) for dim in dims)]


def test_without_tensors_there_is_one_call_that_is_not_successful() -> None:
    converter = ShardingConverter((1,), {"a": "b"}, ["cpu"])
    assert [*converter] == [((1,), {"a": "b"})]
    assert not converter.successful()


def test_devices_are_a_list_or_a_mesh() -> None:
    with pytest.raises(TypeError, match="a list of devices or a DeviceMesh; got 'cpu'"):
        ShardingConverter((torch.ones(2),), {}, "cpu")
    with pytest.raises(ValueError, match="empty"):
        ShardingConverter((torch.ones(2),), {}, [])
    assert len(ShardingConverter((torch.ones(2),), {}).target.devices) == 2


def _on_mesh(rank: Rank) -> list[Any]:
    from torch.distributed.tensor import DTensor

    x, mask = nn.Parameter(torch.arange(10.0).reshape(5, 2)), torch.arange(8) > 3
    converter = ShardingConverter((x, [mask]), {}, rank.mesh())
    seen = []
    for (one, (other,)), _ in converter:
        assert type(one.data) is type(other) is DTensor
        assert isinstance(one, nn.Parameter)
        assert one.is_leaf
        assert torch.equal(one.full_tensor(), x)
        assert torch.equal(other.full_tensor(), mask)
        seen.append((one.placements, other.placements))
        with torch.no_grad():
            one.zero_()
    assert x.sum() == 45
    assert converter.successful()
    return seen


@pytest.mark.devices("cpu")
def test_a_mesh_gives_dtensors() -> None:
    first, second = [(Replicate(),), (Shard(0),), (Shard(1),)], [(Replicate(),), (Shard(0),)]
    for seen in on_threads(_on_mesh, ranks=2):
        assert seen == [(one, other) for one in first for other in second]


def _on_mesh_of_two_dimensions(rank: Rank) -> int:
    x = torch.arange(35.0).reshape(5, 7)
    converter = ShardingConverter((x,), {}, rank.mesh((2, 2)))
    return sum(torch.equal(one.full_tensor(), x) for (one,), _ in converter)


@pytest.mark.devices("cpu")
def test_a_mesh_may_have_two_dimensions() -> None:
    assert on_threads(_on_mesh_of_two_dimensions, ranks=4) == [9] * 4
