"""torch.distributed.checkpoint over machines: states of all ranks, files for one machine, and files of FSDP2."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import FULL, Trained
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh

from dataparallel.composable import CPUOffloadPolicy, fully_shard, replicate
from dataparallel.testing.steps import assert_equal
from machine_ranks import on_machines
from sharded_machines import SPREADS, spread

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # torch's own, without a process group
]


def module(device: Any = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(device=device, dtype=torch.float64)


def ours(devices: list[Any], where: dict[str, Any], form: str = "sharded") -> Any:
    made = module(devices[0])
    if form == "replicated":
        return replicate(made, devices=devices, process_group=distributed.group.WORLD)
    if form == "offloaded":
        where = where | {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    fully_shard(made[0], devices=devices, **where)
    return fully_shard(made, devices=devices, **where)


def saved(rank: int, devices: list[Any], way: str, folder: str, form: str) -> None:
    """Saves and loads again, in a model that has made other steps; also by full states, and while training goes on."""
    one, several = Trained(module(), 2), Trained(ours(devices, spread(way), form), 2)
    checkpoint.save(several.to_save(), checkpoint_id=folder)
    # What is plain, as the number of steps, is the optimizer's own tensor.
    full = copy.deepcopy(several.to_save(FULL))
    saving = checkpoint.async_save(several.to_save(), checkpoint_id=f"{folder} too")
    several.step(5)
    saving.result()
    from_files = Trained(ours(devices, spread(way), form), 1).load(folder)
    from_later = Trained(ours(devices, spread(way), form), 1).load(f"{folder} too")
    from_full = Trained(ours(devices, spread(way), form), 1)
    assert {type(value) for value in full["model"].values()} == {torch.Tensor}
    from_full.set(full, FULL)
    one.step(7)
    for other in (from_files, from_later, from_full):
        assert_equal(other.step(7).state()[0], one.state()[0], "weights", atol=1e-9)


def here(folder: str) -> None:
    """Loads what was saved after two steps, without a process group."""
    expected = Trained(module(), 2)
    for model in (module(), fully_shard(module(), devices=["cpu"] * 3), replicate(module(), devices=["cpu"] * 2)):
        loaded = Trained(model, 1).load(folder)
        assert_equal(loaded.state()[0], expected.state()[0], "weights", atol=1e-9)


@pytest.mark.parametrize(
    ("form", "way"), [*(("sharded", way) for way in SPREADS), ("replicated", "hybrid"), ("offloaded", "1-D")]
)
def test_states_of_all_machines_are_saved_and_loaded(form: str, way: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    on_machines(saved, way, folder, form, ranks=SPREADS[way][0])
    here(folder)


def by_rank_0(rank: int, devices: list[Any], way: str, form: str) -> None:
    """A full state is got by rank 0 alone, in host memory, and goes from there to all."""
    one, several = Trained(module(), 2), Trained(ours(devices, spread(way), form), 2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    of_model = of_torch.get_model_state_dict(several.model, options=options)
    of_optimizer = of_torch.get_optimizer_state_dict(several.model, several.optimizer, options=options)
    assert bool(of_model) == (rank == 0)
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in of_model.values())
    of_model, of_optimizer = copy.deepcopy((of_model, of_optimizer))
    other = Trained(ours(devices, spread(way), form), 1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    of_torch.set_model_state_dict(other.model, of_model, options=options)
    of_torch.set_optimizer_state_dict(other.model, other.optimizer, of_optimizer, options=options)
    assert_equal(other.step(7).state()[0], one.step(7).state()[0], "weights", atol=1e-9)


@pytest.mark.parametrize(
    ("form", "way"), [("sharded", "hybrid"), ("sharded", "2-D"), ("replicated", "hybrid"), ("offloaded", "1-D")]
)
def test_a_full_state_goes_from_rank_0_to_all(form: str, way: str) -> None:
    on_machines(by_rank_0, way, form, ranks=SPREADS[way][0], kind="cpu")  # torch asks for CUDA beside other devices


def loaded(rank: int, devices: list[Any], way: str, form: str, folder: str) -> None:
    there = Trained(ours(devices, spread(way), form), 1).load(folder)
    assert_equal(there.step(7).state()[0], Trained(module(), 2).step(7).state()[0], "weights", atol=1e-9)


@pytest.mark.slots(8)
@pytest.mark.parametrize(("form", "way"), [("sharded", "1-D"), ("replicated", "hybrid"), ("offloaded", "1-D")])
def test_files_of_eight_slots_go_to_machines(form: str, way: str, slots: list, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    checkpoint.save(Trained(ours(slots, {}), 2).to_save(), checkpoint_id=folder)
    on_machines(loaded, way, form, folder, ranks=SPREADS[way][0])


def by_fsdp2(rank: int, devices: list[Any], folder: str, back: str) -> None:
    """Loads what this library has saved into torch's own form, steps, and saves."""
    from torch.distributed.fsdp import fully_shard as form

    model: Any = module()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    form(model[0], mesh=mesh)
    form(model, mesh=mesh)
    theirs = Trained(model, 1).load(folder).step(7)
    checkpoint.save(theirs.to_save(), checkpoint_id=back)


def from_fsdp2(rank: int, devices: list[Any], back: str) -> None:
    loaded = Trained(ours(devices, spread("1-D")), 1).load(back)
    one = Trained(module(), 2).step(7).step(8)
    assert_equal(loaded.step(8).state()[0], one.state()[0], "weights", atol=1e-9)


def test_files_go_to_torchs_own_form_on_processes_and_back(slots: list, tmp_path: Path) -> None:
    folder, back = str(tmp_path / "saved"), str(tmp_path / "back")
    several = Trained(fully_shard(module(slots[0]), devices=slots), 2)
    checkpoint.save(several.to_save(), checkpoint_id=folder)
    on_machines(by_fsdp2, folder, back, ranks=2, slots=1, kind="cpu")
    loaded = Trained(fully_shard(module(slots[0]), devices=slots), 1).load(back)
    one = Trained(module(), 2).step(7).step(8)
    assert_equal(loaded.step(8).state()[0], one.state()[0], "weights", atol=1e-9)
    on_machines(from_fsdp2, back)
