"""Groups, meshes and devices: what they mean, and sentences for those that cannot be meant."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from dataparallel.machines.arguments import MachineMesh, machines_of
from machine_ranks import on_machines, said

pytestmark = pytest.mark.devices("cpu")  # what is sent is in host memory: once is enough


def test_a_group_and_a_mesh():
    with pytest.raises(ValueError, match="pass process_group or mesh, not both"):
        machines_of(object(), object())


@pytest.mark.parametrize("name", ["process_group", "mesh"])
def test_torch_distributed_that_is_not_there(name):
    """Or not any more, so that there is a group or a mesh."""
    is_mesh = name == "mesh"
    arguments = (None, DeviceMesh.__new__(DeviceMesh)) if is_mesh else (torch.distributed.ProcessGroup(0, 1), None)
    with pytest.raises(RuntimeError, match=rf"^{name} was passed.* Call torch.distributed.init_process_group"):
        machines_of(*arguments)


def meanings(rank, devices):
    from torch.distributed.device_mesh import init_device_mesh

    world = torch.distributed.group.WORLD
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {
        "group": machines_of(world, None),
        "mesh": machines_of(None, line),
        "part": machines_of(None, square["shard"]),
        "hybrid": MachineMesh(world, None).given,
        "1-D": MachineMesh(None, line).given,
        "2-D": MachineMesh(None, square).given,
    }
    return {name: [each and each.ranks for each in value] for name, value in found.items()}


def test_what_groups_and_meshes_mean():
    for rank, found in enumerate(on_machines(meanings, ranks=4, slots=1)):
        row, column = rank // 2 * 2, rank % 2
        everyone = [0, 1, 2, 3]
        assert found == {
            "group": [everyone],
            "mesh": [everyone],
            "part": [[row, row + 1]],
            "hybrid": [None, everyone],
            "1-D": [everyone, None],
            "2-D": [[row, row + 1], [column, column + 2]],
        }


def refusals(rank, devices):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    alone = torch.distributed.new_group([0])
    of_rank_0 = DeviceMesh("cpu", [0])
    square = init_device_mesh("cpu", (2, 1))
    named = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("machines", "tp", "cp"))
    found = {
        "3-D": said(machines_of, None, named, 2),
        "2-D": said(machines_of, None, square),
        "named": said(machines_of, None, named),
        "numbers": said(machines_of, [0, 1], None),
        "devices": said(machines_of, None, devices),
    }
    if rank == 1:
        found["no member"] = said(machines_of, alone, None)
        found["not in the mesh"] = said(machines_of, None, of_rank_0)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group(alone)
    if rank == 0:
        found["destroyed"] = said(machines_of, alone, None)
    return found


def test_what_is_refused():
    first, second = on_machines(refusals, ranks=2, slots=1)
    expected = {
        "3-D": "ValueError: the mesh has 3 dimensions of sizes (2, 1, 1); expected one, to shard over, or two",
        "2-D": "ValueError: the mesh has 2 dimensions of sizes (2, 1); expected one, to replicate over",
        "named": "such as mesh['machines']",
        "numbers": "TypeError: process_group=[0, 1]: expected a torch.distributed.",
        "devices": "TypeError: mesh=[device(type=",
    }
    for found in (first, second):
        for name, words in expected.items():
            assert words in found[name], name
    assert "process_group: this process, rank 1 of all, is no member" in second["no member"]
    assert "mesh: this process, rank 1 of all, is no member" in second["not in the mesh"]
    assert "process_group was passed, but" in first["destroyed"]
    assert "has been destroyed" in first["destroyed"]
