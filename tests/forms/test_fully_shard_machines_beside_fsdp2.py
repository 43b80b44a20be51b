"""`fully_shard` over machines beside torch's own on the same meshes, with gloo: 20 steps are the same to 1e-9.

torch has a process for each device, here a machine has two. Each process computes with its part of a batch, and
gradients are averaged over processes: so the loss of a process is multiplied by its number of slots there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from dataparallel.composable import fully_shard
from dataparallel.testing.steps import assert_equal
from machine_ranks import on_machines
from sharded_machines import batches, batches_of_rank, mean_of, sum_of_squares
from sharded_steps import MODELS, moved, on_device, whole

pytestmark = pytest.mark.long

DEVICES, STEPS, MODEL = 4, 20, "gpt"


def trained(
    model: Any, of_step: Callable[[int], Any], loss: Callable[[Any], Tensor], full: Callable[[Any], Any]
) -> Any:
    """The gradients of each step, and the parameters at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        args, kwargs = of_step(step)
        loss(model(*args, **kwargs)).backward()
        gradients.append({name: full(parameter.grad) for name, parameter in model.named_parameters()})
        optimizer.step()
    return gradients, {name: full(parameter) for name, parameter in model.named_parameters()}


def by_fsdp2(rank: int, devices: list[Any], shape: tuple[int, ...], scale: float) -> Any:
    from torch.distributed.fsdp import fully_shard as form

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model: Any = MODELS[MODEL].build()
    for unit in model.units():
        form(unit, mesh=mesh)
    form(model, mesh=mesh)
    own = [*itertools.islice(batches_of_rank(MODEL, rank, DEVICES, "cpu"), STEPS)]
    return trained(
        model,
        own.__getitem__,
        lambda output: sum_of_squares(output) * scale,
        lambda tensor: tensor.detach().full_tensor().clone(),
    )


def by_ours(rank: int, devices: list[Any], shape: tuple[int, ...] | None) -> Any:
    where: dict[str, Any] = {"process_group": distributed.group.WORLD}
    if shape is not None:
        where = {"mesh": init_device_mesh("cpu", shape)}
    model: Any = on_device(MODELS[MODEL].build, devices[0])
    for unit in model.units():
        fully_shard(unit, devices=devices, **where)
    fully_shard(model, devices=devices, **where)
    slots = len(devices)
    of_slots = [
        itertools.islice(batches_of_rank(MODEL, rank * slots + slot, DEVICES, "cpu"), STEPS) for slot in range(slots)
    ]
    own = [moved(joined(parts), devices[0]) for parts in zip(*of_slots, strict=True)]
    return trained(model, own.__getitem__, sum_of_squares, whole)


def joined(parts: Any) -> Any:
    """Several batches of one tensor as one batch."""
    return (torch.cat([args[0] for args, _ in parts]),), {}


@pytest.mark.parametrize(
    ("machines", "shape", "theirs"),
    [
        pytest.param(2, None, (2, 2), id="a group of 2 machines with 2 devices"),
        pytest.param(2, (2,), (4,), id="1-D, 2 machines with 2 devices"),
        pytest.param(2, (2, 1), (2, 2), id="2-D, 2 machines with 2 devices that replicate"),
        pytest.param(4, (4,), (4,), id="1-D, 4 machines"),
        pytest.param(4, (2, 2), (2, 2), id="2-D, 4 machines"),
    ],
)
def test_twenty_steps_are_those_of_fsdp2_and_of_one_device(machines, shape, theirs):
    ours = on_machines(by_ours, shape, ranks=machines, slots=DEVICES // machines)
    fsdp2 = on_machines(by_fsdp2, theirs, DEVICES / machines, ranks=DEVICES, slots=1, kind="cpu")
    one = MODELS[MODEL].build()
    whole_batches = [*itertools.islice(batches(MODEL, DEVICES), STEPS)]
    expected = trained(one, whole_batches.__getitem__, mean_of(machines), whole)
    for found in ours:
        assert_equal(found, fsdp2[0], "beside FSDP2", atol=1e-9)
        assert_equal(found, expected, "beside one device", atol=1e-9)
