"""A script for processes that train a GPT on command, with AdamW: by ``fully_shard``, FSDP2, DDP or the model alone.

``python sharded_contender.py cpu`` is a single process with two intra-op threads. It trains by ``fully_shard`` on two
CPU slots, or the model alone. ``python sharded_contender.py simulated`` does the same on two simulated devices without
clocks, with one intra-op thread, because two devices compute at a time. ``python sharded_contender.py fsdp RANK FILE``
and ``... ddp RANK FILE`` are one of two processes with gloo, each with one intra-op thread and half of the batch. Model
and batch are those of `contender`, and so are the commands.

All ways shard the same blocks, and all processes keep freed memory, as the allocators of accelerators do.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from contender import SLOTS, batch, model, obey
from freed_memory import keep_freed_memory
from nogpu import simulate
from sharded_blocks import blocks_of, full_gradients, sharded

CPU, SIMULATED, FSDP, DDP = "cpu", "simulated", "fsdp", "ddp"
SHARDED, ALONE = "fully_shard", "alone"
RATE = 1e-4  # small, so that the loss still falls after as many steps as a benchmark makes


class Training:
    """Steps of ``network``, which is complete: its optimizer is made here. ``losses`` has that of each step."""

    def __init__(self, network: nn.Module, tokens: Tensor, targets: Tensor) -> None:
        self.network = network
        self.losses: list[Tensor] = []
        self._batch = tokens, targets
        self._optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)

    def step(self) -> None:
        tokens, targets = self._batch
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self.network(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.detach())

    def results(self, gradients: list[Tensor]) -> dict[str, Tensor | list[Tensor]]:
        """The losses of all steps, and ``gradients``, on the CPU."""
        return {"losses": torch.stack(self.losses).cpu(), "gradients": [gradient.cpu() for gradient in gradients]}


def train_in_one_process(devices: list[torch.device]) -> None:
    tokens, targets = (tensor.to(devices[0]) for tensor in batch())
    ways = {
        SHARDED: Training(sharded(model().to(devices[0]), devices), tokens, targets),
        ALONE: Training(model().to(devices[0]), tokens, targets),
    }

    def save(path: str) -> None:
        gradients = {
            SHARDED: full_gradients(ways[SHARDED].network),
            ALONE: [parameter.grad for parameter in ways[ALONE].network.parameters()],
        }
        torch.save({name: training.results(gradients[name]) for name, training in ways.items()}, path)

    obey({name: training.step for name, training in ways.items()}, save)


def train_as_rank(way: str, rank: int, file: str) -> None:
    """With this rank's half of the batch. Both ways average the gradients, as the loss averages the whole batch."""
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=SLOTS, timeout=timedelta(minutes=2)
    )
    tokens, targets = (whole.chunk(SLOTS)[rank].contiguous() for whole in batch())
    training = Training(fsdp(model()) if way == FSDP else nn.parallel.DistributedDataParallel(model()), tokens, targets)

    def save(path: str) -> None:
        gradients = [parameter.grad for parameter in training.network.parameters()]
        if way == FSDP:
            gradients = [gradient.full_tensor() for gradient in gradients]
        results = training.results(gradients)
        dist.all_reduce(results["losses"])
        results["losses"] /= SLOTS
        if rank == 0:
            torch.save({way: results}, path)

    obey({way: training.step}, save)
    dist.destroy_process_group()


def fsdp(network: nn.Module) -> nn.Module:
    """FSDP2 with the units of `sharded`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (SLOTS,))
    for block in blocks_of(network):
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def main(place: str, rank: str = "", file: str = "") -> None:
    torch.set_num_threads(SLOTS if place == CPU else 1)  # before anything that runs a backward
    keep_freed_memory()
    if place in (FSDP, DDP):
        train_as_rank(place, int(rank), file)
        return
    devices = simulate(SLOTS) if place == SIMULATED else [torch.device("cpu")] * SLOTS
    with torch.sim.clocks(False) if place == SIMULATED else nullcontext():
        train_in_one_process(devices)


if __name__ == "__main__":
    main(*sys.argv[1:])
