"""Sharded tensors in files: what comes back, where it is, and who owns it."""

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


@pytest.mark.parametrize("shape", [(7, 3), (), (2, 3), (0, 3)])
@pytest.mark.parametrize("placement", [Shard(0), Shard(-1), Replicate()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_was_saved_comes_back(shape: tuple, placement: Any, dtype: torch.dtype, slots: list) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    tensor = distribute_tensor(whole, slots, placement)
    for loaded in (through_a_file(tensor), pickle.loads(pickle.dumps(tensor))):
        assert same(loaded, whole)
        assert (loaded.placement, loaded.devices) == (tensor.placement, owners(slots))
        assert places(loaded) == owners(slots)
        assert [shard.shape for shard in loaded.shards] == [shard.shape for shard in tensor.shards]
        assert not loaded.requires_grad


def test_parameters_come_back_as_parameters(whole: Tensor, slots: list) -> None:
    parameter = nn.Parameter(distribute_tensor(whole, slots))
    loaded, again = through_a_file([parameter, parameter])
    assert isinstance(loaded, nn.Parameter)
    assert loaded.requires_grad
    assert loaded is again
    frozen = through_a_file(nn.Parameter(distribute_tensor(whole, slots), requires_grad=False))
    assert isinstance(frozen, nn.Parameter)
    assert not frozen.requires_grad


@pytest.mark.parametrize(
    "location", ["cpu", CPU, lambda storage, location: storage], ids=["name", "device", "function"]
)
def test_on_the_cpu_the_owners_stay_known(location: Any, whole: Tensor, slots: list, root: torch.device) -> None:
    loaded = through_a_file(distribute_tensor(whole, slots), map_location=location)
    assert places(loaded) == (CPU,) * 3
    assert loaded.devices == owners(slots)
    assert same(loaded, whole)
    back = loaded.to(root)
    assert places(back) == owners(slots)
    assert same(back, whole)


@pytest.mark.devices("sim")
@pytest.mark.parametrize(
    ("saved_on", "location", "expected"),
    [
        # As with ``.to``: a script that says ``map_location=device`` need not know that the model is sharded.
        (["sim:0", "sim:1", "sim:2"], "sim:5", ["sim:0", "sim:1", "sim:2"]),
        (
            ["sim:0", "sim:1", "sim:2"],
            {"sim:0": "sim:3", "sim:1": "sim:2", "sim:2": "sim:1"},
            ["sim:3", "sim:2", "sim:1"],
        ),
        (["cpu", "cpu"], "sim:1", ["sim:1", "sim:1"]),
    ],
    ids=["one accelerator", "one by one", "a CPU tensor"],
)
def test_on_accelerators(saved_on: list, location: Any, expected: list, whole: Tensor) -> None:
    loaded = through_a_file(distribute_tensor(whole, saved_on), map_location=location)
    assert places(loaded) == loaded.devices == owners(expected)
    assert same(loaded, whole)


@pytest.mark.devices("sim")
def test_owners_that_the_machine_lacks(whole: Tensor) -> None:
    """A file of a machine with more devices: on the CPU they stay known, elsewhere they are replaced."""
    far = [torch.device("sim", 62), torch.device("sim", 63)]
    tensor = ShardedTensor(distribute_tensor(whole, ["cpu", "cpu"]).shards, Shard(0), whole.shape, far)
    loaded = through_a_file(tensor)
    assert loaded.devices == tuple(far)
    assert same(distribute_tensor(loaded, ["sim:0", "sim:1", "sim:2"]), whole)


def test_a_module_is_pickled_with_its_ties(whole: Tensor, slots: list) -> None:
    module = nn.Module()
    module.weight = module.tied = nn.Parameter(distribute_tensor(whole, slots))
    again = pickle.loads(pickle.dumps(module))
    assert again.weight is again.tied
    assert same(again.weight, whole)
