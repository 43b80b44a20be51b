"""What a sharded tensor is to its user: a tensor with shards, a gradient that is divided alike, and clear refusals."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dataparallel.sharded import Replicate, Shard, ShardedTensor, distribute_tensor
from dataparallel.sharded.placements import over_of
from sharding import same


@pytest.fixture
def parameter(sharded: ShardedTensor) -> nn.Parameter:
    return nn.Parameter(sharded)


# What it is


def test_it_looks_like_the_whole(sharded: ShardedTensor, whole: Tensor, root: torch.device) -> None:
    assert isinstance(sharded, Tensor)
    assert (sharded.shape, sharded.dtype, sharded.device) == (whole.shape, whole.dtype, root)
    assert (sharded.numel(), sharded.dim(), len(sharded), sharded.is_contiguous()) == (21, 2, 7, True)


def test_its_representation_says_how_it_is_divided(slots: list) -> None:
    words = repr(distribute_tensor(torch.ones(4, 2), slots, Shard(1)))
    for expected in ("ShardedTensor(", "shape=(4, 2)", "torch.float32", "Shard(dim=1)", str(slots[0])):
        assert expected in words
    assert "now on meta" in repr(distribute_tensor(torch.empty(4, 2, device="meta"), slots))


def test_a_parameter_of_it_is_on_the_same_shards(sharded: ShardedTensor, parameter: nn.Parameter) -> None:
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, ShardedTensor)
    assert parameter.requires_grad
    for other in (parameter, parameter.data):
        assert all(a is b for a, b in zip(other.shards, sharded.shards, strict=True))
    assert type(parameter.data) is ShardedTensor
    assert not parameter.data.requires_grad


def test_torch_flattens_it(sharded: ShardedTensor) -> None:
    assert is_traceable_wrapper_subclass(sharded)
    names, context = sharded.__tensor_flatten__()
    shards = {name: getattr(sharded, name) for name in names}
    again = ShardedTensor.__tensor_unflatten__(shards, context, sharded.shape, sharded.stride())
    assert all(a is b for a, b in zip(again.shards, sharded.shards, strict=True))
    assert (again.placement, again.devices, again.shape) == (sharded.placement, sharded.devices, sharded.shape)
    with pytest.raises(AttributeError, match="_shard_9"):
        _ = sharded._shard_9
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        _ = sharded.weight


# Gradients


def test_other_gradients_are_refused(parameter: nn.Parameter, whole: Tensor, slots: list) -> None:
    with pytest.raises(TypeError, match=r"got a plain tensor of shape \(7, 3\).*distribute_tensor"):
        parameter.grad = whole
    with pytest.raises(TypeError, match="got int"):
        parameter.grad = 1
    for other in (
        distribute_tensor(whole, slots, Shard(1)),
        distribute_tensor(whole, slots, Replicate()),
        distribute_tensor(whole, slots[:2]),
        distribute_tensor(whole[:6], slots),
    ):
        with pytest.raises(ValueError, match="must be sharded as it is"):
            parameter.grad = other
    assert parameter.grad is None


def test_the_gradient_of_a_sum_is_divided(parameter: nn.Parameter, whole: Tensor, slots: list) -> None:
    (parameter * 2).sum().backward()
    assert same(parameter.grad, torch.full((7, 3), 2.0))
    # Plain on sharded, sharded on sharded, plain on sharded again.
    (parameter * 3).sum().backward()
    (parameter * parameter).sum().backward()
    (parameter * 3).sum().backward()
    assert same(parameter.grad, 8 + 2 * whole)
    assert parameter.grad.devices == parameter.devices
    del parameter.grad
    assert parameter.grad is None


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_plain_gradient_with_a_graph_is_not_divided(parameter: nn.Parameter, root: torch.device) -> None:
    """Its graph would be lost."""
    scale = torch.ones(7, 3, device=root, requires_grad=True)
    parameter.clone().backward(scale * 2, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        _ = parameter.grad


def test_gradients_of_another_placement_or_dtype_become_the_parameters(
    parameter: nn.Parameter, whole: Tensor, slots: list
) -> None:
    parameter.clone().backward(distribute_tensor(whole, slots, Replicate()))
    assert same(parameter.grad, whole)
    parameter.to(torch.float64).backward(distribute_tensor(whole.double(), slots))
    assert (parameter.grad.placement, parameter.grad.dtype) == (Shard(0), torch.float32)
    assert same(parameter.grad, 2 * whole)


# Data


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_setting_data_takes_the_other_shards(
    parameter: nn.Parameter, whole: Tensor, slots: list, dtype: torch.dtype
) -> None:
    other = distribute_tensor(whole.to(dtype) + 1, slots)
    parameter.data = other
    assert all(a is b for a, b in zip(parameter.shards, other.shards, strict=True))
    assert parameter.dtype == dtype
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert same(parameter, whole.to(dtype) + 1)
    parameter.clone().backward(other.detach())
    assert same(parameter.grad, whole.to(dtype) + 1)


def test_other_data_is_refused(parameter: nn.Parameter, whole: Tensor, slots: list) -> None:
    with pytest.raises(TypeError, match=r"the data of.*got a plain tensor.*copy_"):
        parameter.data = whole + 1
    for other in (distribute_tensor(whole, slots[:2]), distribute_tensor(whole[:6], slots)):
        with pytest.raises(ValueError, match=r"the data of.*must be sharded as it is"):
            parameter.data = other
    assert same(parameter, whole)


# Copies


@pytest.mark.slots(4)
def test_a_deep_copy_has_memory_of_its_own(whole: Tensor, on_owners: Callable[[Callable], list]) -> None:
    """Also as a part of a module, where it is tied, and over machines."""

    def check(owners: Any) -> None:
        module = nn.Module()
        module.weight = module.tied = parameter = nn.Parameter(distribute_tensor(whole, owners))
        parameter.grad = distribute_tensor(whole * 2, owners)
        parameter.note = ["a"]
        copied = copy.deepcopy(module).weight
        if (over := over_of(owners)) is not None:
            assert over.machines.calls == []
        for shard in (*parameter.shards, *parameter.grad.shards):
            shard.zero_()
        parameter.note.append("b")
        assert isinstance(copied, nn.Parameter)
        assert copied is not parameter
        assert copied.requires_grad
        assert (copied.devices, copied.over) == (parameter.devices, over)
        assert same(copied, whole)
        assert same(copied.grad, whole * 2)
        assert copied.note == ["a"]
        again = copy.deepcopy(module)
        assert again.weight is again.tied
        with pytest.raises(RuntimeError, match="only leaves"):
            copy.deepcopy(parameter.clone())

    on_owners(check)


# Refusals


def test_python_operators_leave_other_objects_alone(sharded: ShardedTensor) -> None:
    assert (sharded == None) is False  # noqa: E711
    assert (sharded == "text") is False
    assert {sharded: 1}[sharded] == 1
    with pytest.raises(TypeError, match="unsupported operand"):
        sharded + "text"


NOT_OF_PARTS: dict[str, Any] = {
    **dict.fromkeys(["numpy", "tolist", "data_ptr", "storage", "untyped_storage", "share_memory_"], ()),
    "apply_": (abs,),
    "map_": (torch.ones(7, 3), max),
    "map2_": (torch.ones(7, 3), torch.ones(7, 3), max),
}


@pytest.mark.parametrize("name", NOT_OF_PARTS)
def test_it_has_no_memory_of_its_own(name: str, sharded: ShardedTensor) -> None:
    with pytest.raises(TypeError, match=rf"{name} does not work.*full_tensor\(\)"):
        getattr(sharded, name)(*NOT_OF_PARTS[name])


def test_nothing_reads_a_null_pointer(slots: list) -> None:
    """Where C++ code wants the memory of the whole."""
    sharded = distribute_tensor(torch.ones(7, 3), ["cpu", "cpu"])
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(sharded)
