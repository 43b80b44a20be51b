"""Sharded tensors in files: what comes back, where it is, and who owns it."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, ShardedTensor, distribute_tensor
from sharding import owners, places, same

CPU = torch.device("cpu")


def through_a_file(value: Any, **how: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **how)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_was_saved_comes_back(placement: object, dtype: torch.dtype, whole: Tensor, slots: list) -> None:
    tensor = distribute_tensor(whole.to(dtype), slots, placement)
    for loaded in (through_a_file(tensor), pickle.loads(pickle.dumps(tensor))):
        assert same(loaded, whole.to(dtype))
        assert (loaded.placement, loaded.devices) == (placement, owners(slots))
        assert places(loaded) == owners(slots)
        assert not loaded.requires_grad


@pytest.mark.parametrize("shape", [(), (2, 3), (0, 3)])
def test_few_rows_come_back(shape: tuple, slots: list) -> None:
    tensor = torch.ones(shape)
    loaded = through_a_file(distribute_tensor(tensor, slots))
    assert same(loaded, tensor)
    assert [shard.shape for shard in loaded.shards] == [s.shape for s in distribute_tensor(tensor, slots).shards]


def test_parameters_come_back_as_parameters(whole: Tensor, slots: list) -> None:
    parameter = nn.Parameter(distribute_tensor(whole, slots))
    loaded, again = through_a_file([parameter, parameter])
    assert isinstance(loaded, nn.Parameter)
    assert loaded.requires_grad
    assert loaded is again
    frozen = through_a_file(nn.Parameter(distribute_tensor(whole, slots), requires_grad=False))
    assert isinstance(frozen, nn.Parameter)
    assert not frozen.requires_grad


def test_hooks_are_not_saved(whole: Tensor, slots: list) -> None:
    parameter = nn.Parameter(distribute_tensor(whole, slots))
    parameter.register_hook(lambda gradient: None)
    with pytest.warns(UserWarning, match="hook"):
        through_a_file(parameter)


def test_a_shallow_copy_is_on_the_same_shards(whole: Tensor, slots: list) -> None:
    tensor = distribute_tensor(whole, slots)
    copied = copy.copy(tensor)
    assert copied is not tensor
    assert all(a is b for a, b in zip(copied.shards, tensor.shards, strict=True))


LOCATIONS: dict[str, Any] = {
    "cpu": "cpu",
    "device": CPU,
    "dict": {f"{kind}:{index}": "cpu" for kind in ("sim", "cuda") for index in range(8)},
    "callable": lambda storage, location: storage,
}


@pytest.mark.parametrize("location", LOCATIONS.values(), ids=LOCATIONS)
def test_on_the_cpu_the_owners_stay_known(location: Any, whole: Tensor, slots: list, root: torch.device) -> None:
    loaded = through_a_file(distribute_tensor(whole, slots), map_location=location)
    assert places(loaded) == (CPU,) * 3
    assert loaded.devices == owners(slots)
    assert same(loaded, whole)
    back = loaded.to(root)
    assert places(back) == owners(slots)
    assert same(back, whole)


@pytest.mark.devices("sim")
def test_one_accelerator_means_the_owners(whole: Tensor, slots: list) -> None:
    """As with ``.to``: a script that says ``map_location=device`` need not know that the model is sharded."""
    for location in ("sim:0", "sim:5"):
        loaded = through_a_file(distribute_tensor(whole, slots), map_location=location)
        assert places(loaded) == loaded.devices == owners(slots)
        assert same(loaded, whole)


@pytest.mark.devices("sim")
def test_places_that_were_chosen_one_by_one_are_the_owners(whole: Tensor) -> None:
    slots = ["sim:0", "sim:1", "sim:2"]
    moved = {"sim:0": "sim:3", "sim:1": "sim:2", "sim:2": "sim:1"}
    loaded = through_a_file(distribute_tensor(whole, slots), map_location=moved)
    assert places(loaded) == loaded.devices == owners(["sim:3", "sim:2", "sim:1"])
    assert same(loaded, whole)


@pytest.mark.devices("sim")
def test_owners_that_the_machine_lacks(whole: Tensor) -> None:
    """A file of a machine with more devices: on the CPU they stay known, elsewhere they are replaced."""
    far = [torch.device("sim", 62), torch.device("sim", 63)]
    tensor = ShardedTensor(distribute_tensor(whole, ["cpu", "cpu"]).shards, Shard(0), whole.shape, far)
    loaded = through_a_file(tensor)
    assert loaded.devices == tuple(far)
    assert same(loaded, whole)
    anew = distribute_tensor(loaded, ["sim:0", "sim:1", "sim:2"])
    assert same(anew, whole)


@pytest.mark.devices("sim")
def test_parts_of_a_cpu_tensor_may_be_loaded_to_an_accelerator(whole: Tensor) -> None:
    loaded = through_a_file(distribute_tensor(whole, ["cpu", "cpu"]), map_location="sim:1")
    assert places(loaded) == loaded.devices == owners(["sim:1", "sim:1"])
    assert same(loaded, whole)


@pytest.mark.parametrize("location", [None, "cpu"])
def test_an_optimizer_gets_its_state_on_the_owners(location: str | None, whole: Tensor, slots: list) -> None:
    """`torch.optim.Optimizer.load_state_dict` moves state to the device of the parameter."""
    parameter = nn.Parameter(distribute_tensor(whole, slots))
    optimizer = torch.optim.AdamW([parameter])
    state = optimizer.state_dict()
    state["state"] = {0: {"step": torch.tensor(3.0), "exp_avg": distribute_tensor(whole, slots)}}
    optimizer.load_state_dict(through_a_file(state, map_location=location))
    loaded = optimizer.state[parameter]["exp_avg"]
    assert places(loaded) == loaded.devices == owners(slots)
    assert same(loaded, whole)
    assert optimizer.state[parameter]["step"].item() == 3


def test_modules_and_their_states(whole: Tensor, slots: list) -> None:
    module = nn.Module()
    module.weight = module.tied = nn.Parameter(distribute_tensor(whole, slots))
    loaded = through_a_file(module.state_dict(), map_location="cpu")
    module.weight.detach().copy_(torch.tensor(0.0))
    module.load_state_dict(loaded)
    assert same(module.weight, whole)
    again = pickle.loads(pickle.dumps(module))
    assert again.weight is again.tied
    assert same(again.weight, whole)
