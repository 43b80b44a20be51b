"""A script for processes that train a GPT together: by this library's forms over machines, by DDP, or by FSDP2.

``python machine_contender.py RANK RANKS FILE BACKEND SLOTS WAY...`` is one of RANKS processes, which find each other
through FILE. BACKEND is ``gloo``, or ``counted`` where bytes are counted instead of times. SLOTS is the number of CPU
slots that each process has. Each WAY is a name of `WAYS`, and the command that makes its step. With ``", AdamW"``
appended it is the command for a step with the optimizer.

Model and whole batch are those of `contender`, and so are the commands. Each process has its part of the batch and one
intra-op thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from contender import batch, model, obey
from counted_group import BACKEND as COUNTED
from counted_group import SENT, register
from dataparallel.sharded import ShardedTensor
from sharded_blocks import blocks_of

OPTIMIZER = ", AdamW"
REPLICATE, REPLICATE_FP16 = "replicate", "replicate, fp16"
HYBRID, ONE_MESH, TWO_MESH = "fully_shard, hybrid", "fully_shard, 1-D mesh", "fully_shard, 2-D mesh"
DDP, DDP_UNUSED, DDP_FP16 = "DDP", "DDP, find_unused_parameters", "DDP, fp16"
FSDP_ONE_MESH, FSDP_TWO_MESH = "FSDP2, 1-D mesh", "FSDP2, 2-D mesh"

RATE = 1e-4


Form = Callable[[nn.Module, int], nn.Module]  # gets a model and how many slots each process has


def replicated(network: nn.Module, slots: int) -> nn.Module:
    from dataparallel.composable import replicate

    return replicate(network, devices=["cpu"] * slots, process_group=dist.group.WORLD)


def ddp(network: nn.Module, _: int, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(network, **options)


def compressed(form: Form) -> Form:
    """The form with torch's hook that sends gradients in half precision."""

    def with_hook(network: nn.Module, slots: int) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        network = form(network, slots)
        network.register_comm_hook(None, fp16_compress_hook)
        return network

    return with_hook


def sharded(network: nn.Module, slots: int, **options: Any) -> nn.Module:
    from dataparallel.composable import fully_shard

    for block in blocks_of(network):
        fully_shard(block, devices=["cpu"] * slots, **options)
    return fully_shard(network, devices=["cpu"] * slots, **options)


def mesh_of(dimensions: int) -> Any:
    """Over all processes: in one dimension, or (2, half of them), replicated over the first."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = dist.get_world_size()
    if dimensions == 1:
        return init_device_mesh("cpu", (ranks,))
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))


def fsdp(network: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(network):
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


WAYS: dict[str, Form] = {
    REPLICATE: replicated,
    REPLICATE_FP16: compressed(replicated),
    DDP: ddp,
    DDP_UNUSED: lambda network, slots: ddp(network, slots, find_unused_parameters=True),
    DDP_FP16: compressed(ddp),
    HYBRID: lambda network, slots: sharded(network, slots, process_group=dist.group.WORLD),
    ONE_MESH: lambda network, slots: sharded(network, slots, mesh=mesh_of(1)),
    TWO_MESH: lambda network, slots: sharded(network, slots, mesh=mesh_of(2)),
    FSDP_ONE_MESH: lambda network, _: fsdp(network, mesh_of(1)),
    FSDP_TWO_MESH: lambda network, _: fsdp(network, mesh_of(2)),
}


@dataclass(frozen=True)
class Found:
    """What one rank has after its last step: bytes that it holds, bytes that it has sent in that step, gradients."""

    parameters: int
    gradients: int
    states: int
    sent: int
    calls: int
    whole_gradients: list[Tensor]


class Training:
    """Steps with this rank's part of the batch. All ways average over ranks, as the loss averages the whole batch."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self._optimizer: Optimizer | None = None
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._tokens, self._targets = (whole.chunk(ranks)[rank].contiguous() for whole in batch())
        self._sent = self._calls = 0

    def step(self) -> None:
        """A training step without its optimizer, which is the same everywhere."""
        self.network.zero_grad()
        SENT.clear()
        F.cross_entropy(self.network(self._tokens).flatten(0, 1), self._targets.flatten()).backward()
        self._sent, self._calls = SENT.total, SENT.calls.total()

    def step_with_optimizer(self) -> None:
        if self._optimizer is None:
            self._optimizer = AdamW(self.network.parameters(), lr=RATE)
        self.step()
        self._optimizer.step()

    def found(self) -> Found:
        parameters = list(self.network.parameters())
        states = [] if self._optimizer is None else [*self._optimizer.state.values()]
        return Found(
            parameters=sum(map(held, parameters)),
            gradients=sum(held(parameter.grad) for parameter in parameters),
            states=sum(held(value) for state in states for value in state.values() if isinstance(value, Tensor)),
            sent=self._sent,
            calls=self._calls,
            whole_gradients=[whole(parameter.grad) for parameter in parameters],
        )


def held(tensor: Tensor) -> int:
    """The bytes of a tensor in this process: those of its parts here, if it is sharded."""
    if isinstance(tensor, ShardedTensor):
        return sum(shard.nbytes for shard in tensor.shards)
    return tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it. Every rank has to call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def main(rank: str, ranks: str, file: str, backend: str, slots: str, *ways: str) -> None:
    torch.set_num_threads(1)  # before anything that runs a backward
    if backend == COUNTED:
        register()
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=int(rank), world_size=int(ranks), timeout=timedelta(minutes=2)
    )
    trainings = {way: Training(WAYS[way](model(), int(slots))) for way in ways}
    steps = {way: training.step for way, training in trainings.items()}
    steps |= {way + OPTIMIZER: training.step_with_optimizer for way, training in trainings.items()}

    def save(path: str) -> None:
        """What each rank has, by way. All ranks have to be told to save."""
        found: list[Any] = [None] * int(ranks)
        dist.all_gather_object(found, {way: vars(training.found()) for way, training in trainings.items()})
        if rank == "0":
            torch.save({way: [of_rank[way] for of_rank in found] for way in ways}, path)

    obey(steps, save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
