"""Steps over machines in which something happens at places of the model: a delay, or the end of the process.

The model calls `happens.now` at its places, in forward and in backward, on every slot; a test sets it, in the rank.
`train` saves its state now and then, and goes on from what it finds.

The batches of ranks have different sizes. In some steps only one rank takes a branch, but not where parameters are
sharded over machines: there all ranks have to gather the same units.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

from dataparallel.composable import fully_shard, replicate
from sharded_steps import sharded

FORMS = ["replicate", "hybrid", "1-D"]

FIRST_MB, CAP_MB = 64 / 2**20, 400 / 2**20  # about a bucket for a layer
WIDTH = 6
SIZES = 5, 4, 7
"""Samples of the batches of a rank."""

SAVED = 2
"""The state is saved after so many steps, again and again."""


class Happens:
    """What happens at places, in this process."""

    def __init__(self) -> None:
        self.now: Callable[[str], None] = lambda place: None


happens = Happens()


class Place(torch.autograd.Function):
    """The identity: its forward and its backward are places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        happens.now(f"forward {name}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        happens.now(f"backward {ctx.name}")
        return grad.clone(), None


class Layers(nn.Module):
    """Layers with places behind them, buffers, and a branch for some samples.

    Args:
        may_skip: if the branch is left out when no sample takes it.
    """

    def __init__(self, may_skip: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.branch = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.may_skip = may_skip

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, layer in enumerate(self.layers):
            y = Place.apply(torch.tanh(layer(y)), str(number))
        (taken,) = torch.where(x[:, 0] < 0)
        if taken.numel() or not self.may_skip:
            y = y.index_add(0, taken, self.branch(x[taken]))
        return self.norm(y)

    def units(self) -> list[nn.Module]:
        """What is sharded by itself."""
        return [*self.layers, self.branch]


def build(form: str, device: torch.device, seed: int = 0) -> Layers:
    """The model on a device."""
    torch.manual_seed(seed)
    return Layers(may_skip=form != "1-D").double().to(device)


def apply(form: str, model: nn.Module, devices: Sequence[torch.device]) -> Any:
    """The model with one of `FORMS`, over all ranks."""
    group = distributed.group.WORLD
    if form == "replicate":
        return replicate(model, devices=devices, process_group=group, bucket_cap_mb=CAP_MB, first_bucket_mb=FIRST_MB)
    if form == "hybrid":
        return sharded(model, devices, process_group=group)
    return sharded(model, devices, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))


def batch_of(rank: int, step: int) -> Tensor:
    """The batch of a rank. In every third step only rank 0 takes the branch, in every other third none does."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(SIZES[rank], WIDTH, dtype=torch.float64, generator=generator)
    if step % 3:
        x[:, 0] = x[:, 0].abs()
        if step % 3 == 1 and rank == 0:
            x[0, 0] *= -1
    return x


def train(
    form: str,
    rank: int,
    devices: Sequence[torch.device],
    steps: int,
    folder: str | None = None,
    before: Callable[[Any], object] = lambda model: None,
) -> dict[str, Tensor]:
    """Trains to a number of steps and returns the whole values, which all ranks have to do.

    Between steps are places too.

    Args:
        form: of `FORMS`.
        rank: of the default group.
        devices: the slots.
        steps: how many in all.
        folder: where the state is saved and looked for.
        before: called with the module before the first step.
    """
    return values(form, trained(form, rank, devices, steps, folder, before))


def trained(
    form: str,
    rank: int,
    devices: Sequence[torch.device],
    steps: int,
    folder: str | None = None,
    before: Callable[[Any], object] = lambda model: None,
) -> Any:
    """As `train`, and returns the model."""
    happens.now("start")
    model = build(form, devices[0], seed=rank)
    file = None if folder is None else Path(folder, "state")
    state = torch.load(file) if file is not None and file.exists() else None
    if state is not None and form == "replicate":
        model.load_state_dict(state["model"])
    model = apply(form, model, devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if state is not None:
        if form == "replicate":
            optimizer.load_state_dict(state["optimizer"])
        else:
            fully_shard.load_full_state_dict(model, (state["model"], state["optimizer"]), optimizer)
    before(model)
    for step in range(state["step"] if state is not None else 0, steps):
        happens.now(f"before step {step}")
        optimizer.zero_grad()
        model(batch_of(rank, step).to(devices[0])).square().sum(dim=1).mean().backward()
        optimizer.step()
        if file is not None and (step + 1) % SAVED == 0:
            _save(form, model, optimizer, step + 1, file, rank)
    return model


def _save(form: str, model: Any, optimizer: torch.optim.Optimizer, step: int, file: Path, rank: int) -> None:
    if form == "replicate":
        states: Any = on_cpu((model.state_dict(), optimizer.state_dict()))
    else:
        states = fully_shard.full_state_dict(model, optimizer)
    if rank == 0:
        new = file.with_suffix(".new")
        torch.save({"step": step, "model": states[0], "optimizer": states[1]}, new)
        os.replace(new, file)


def on_cpu(tree: Any) -> Any:
    """Copies of the tensors of a tree."""
    return tree_map(lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf, tree)


def values(form: str, model: Any) -> dict[str, Tensor]:
    """The whole values of the parameters, and this rank's buffers."""
    found: dict[str, Tensor] = dict(
        on_cpu(model.state_dict()) if form == "replicate" else fully_shard.full_state_dict(model)
    )
    return found


def assert_equal_values(found: dict[str, Tensor], expected: dict[str, Tensor], *, buffers: bool = True) -> None:
    """Checks that all values are equal. ``buffers``: those too."""
    assert found.keys() == expected.keys()
    for name in found:
        if buffers or ("running" not in name and "num_batches" not in name):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
