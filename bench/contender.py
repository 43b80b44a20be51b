"""A script for processes that train a GPT on command, alone or together: by this library, DDP, FSDP2, or the model.

``python contender.py SLOTS WAY...`` is a single process. SLOTS is its number of CPU slots, for which it has as many
intra-op threads, or ``simulated`` for two simulated devices without clocks. With ``-- RANK RANKS FILE BACKEND``
appended it is one of RANKS processes with one thread each, which find each other through FILE and have a part of the
batch each. BACKEND is ``gloo``, or ``counted`` where bytes are counted instead of times. Each WAY is a name of `WAYS`,
and the command that makes its step. With ``", AdamW"`` appended it is the command for a step with the optimizer.

`child_processes` starts them and talks to them. A command is a line on stdin, and a line on stdout says that it is
done. A process that has no command waits for its stdin and takes no time from the others.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from counted_group import BACKEND as COUNTED
from counted_group import SENT, register
from dataparallel import DataParallel
from dataparallel.composable import replicate
from dataparallel.sharded import ShardedTensor
from nogpu import simulate
from shapes import GPT, VOCABULARY
from sharded_blocks import blocks_of, sharded

SLOTS = 2
SAMPLES_PER_SLOT = 8
LENGTH = 64
RATE = 1e-4  # small, so that the loss still falls after as many steps as a benchmark makes
SIMULATED = "simulated"
COLLECT = "collect garbage"
SAVE = "save "
DONE = "done"

OPTIMIZER = ", AdamW"
ALONE, WRAPPER = "alone", "DataParallel"
REPLICATE, REPLICATE_FP16 = "replicate", "replicate, fp16"
SHARDED = "fully_shard"
HYBRID, ONE_MESH, TWO_MESH = "fully_shard, hybrid", "fully_shard, 1-D mesh", "fully_shard, 2-D mesh"
DDP, DDP_UNUSED, DDP_FP16 = "DDP", "DDP, find_unused_parameters", "DDP, fp16"
FSDP_ONE_MESH, FSDP_TWO_MESH = "FSDP2, 1-D mesh", "FSDP2, 2-D mesh"

Devices = Sequence[torch.device]
Form = Callable[[nn.Module, Devices], nn.Module]  # gets a model on the first of the devices of this process


def model() -> nn.Module:
    """The same model in every process."""
    torch.manual_seed(0)
    return GPT(width=256, blocks=6, heads=4, length=LENGTH)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, both ``(samples, length)``."""
    text = torch.randint(VOCABULARY, (SLOTS * SAMPLES_PER_SLOT, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def world() -> Any:
    """The process group of all ranks, or `None` in a single process."""
    return dist.group.WORLD if dist.is_initialized() else None


def replicated(network: nn.Module, devices: Devices) -> nn.Module:
    return replicate(network, devices=devices, process_group=world())


def ddp(network: nn.Module, _: Devices, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(network, **options)


def compressed(form: Form) -> Form:
    """The form with torch's hook that sends gradients in half precision."""

    def with_hook(network: nn.Module, devices: Devices) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        network = form(network, devices)
        network.register_comm_hook(None, fp16_compress_hook)
        return network

    return with_hook


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
    ALONE: lambda network, _: network,
    WRAPPER: lambda network, devices: DataParallel(network, devices),
    REPLICATE: replicated,
    REPLICATE_FP16: compressed(replicated),
    DDP: ddp,
    DDP_UNUSED: lambda network, devices: ddp(network, devices, find_unused_parameters=True),
    DDP_FP16: compressed(ddp),
    SHARDED: sharded,
    HYBRID: lambda network, devices: sharded(network, devices, process_group=world()),
    ONE_MESH: lambda network, devices: sharded(network, devices, mesh=mesh_of(1)),
    TWO_MESH: lambda network, devices: sharded(network, devices, mesh=mesh_of(2)),
    FSDP_ONE_MESH: lambda network, _: fsdp(network, mesh_of(1)),
    FSDP_TWO_MESH: lambda network, _: fsdp(network, mesh_of(2)),
}


class Training:
    """Steps with this process's part of the batch. All ways average over ranks, as the loss averages the batch."""

    def __init__(self, network: nn.Module, device: torch.device, rank: int, ranks: int) -> None:
        self.network = network
        self._optimizer: Optimizer | None = None
        self._tokens, self._targets = (whole.chunk(ranks)[rank].contiguous().to(device) for whole in batch())
        self._losses: list[Tensor] = []
        self._sent = self._calls = 0

    def step(self) -> None:
        """A training step without its optimizer, which is the same everywhere."""
        self.network.zero_grad()
        SENT.clear()
        loss = F.cross_entropy(self.network(self._tokens).flatten(0, 1), self._targets.flatten())
        loss.backward()
        self._losses.append(loss.detach())
        self._sent, self._calls = SENT.total, SENT.calls.total()

    def step_with_optimizer(self) -> None:
        if self._optimizer is None:
            self._optimizer = AdamW(self.network.parameters(), lr=RATE)
        self.step()
        self._optimizer.step()

    def found(self) -> dict[str, Any]:
        """After the last step: bytes held, bytes sent in that step, all losses, and all of the gradients."""
        parameters = list(self.network.parameters())
        states = [] if self._optimizer is None else [*self._optimizer.state.values()]
        return {
            "parameters": sum(map(held, parameters)),
            "gradients_held": sum(held(parameter.grad) for parameter in parameters),
            "states": sum(held(value) for state in states for value in state.values() if isinstance(value, Tensor)),
            "sent": self._sent,
            "calls": self._calls,
            "losses": torch.stack(self._losses).cpu(),
            "gradients": [whole(parameter.grad).cpu() for parameter in parameters],
        }


def held(tensor: Tensor) -> int:
    """The bytes of a tensor in this process: those of its parts here, if it is sharded."""
    if isinstance(tensor, ShardedTensor):
        return sum(shard.nbytes for shard in tensor.shards)
    return tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it. Every rank has to call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def obey(steps: Mapping[str, Callable[[], object]], save: Callable[[str], None]) -> None:
    """Carries out the commands on stdin, until it is closed. ``save`` gets the path of a file."""
    gc.collect()
    gc.freeze()  # so that collections need not visit what torch has imported
    print(DONE, flush=True)
    for line in sys.stdin:
        command = line.rstrip("\n")
        if command == COLLECT:
            gc.collect()
        elif command.startswith(SAVE):
            save(command.removeprefix(SAVE))
        else:
            steps[command]()
        print(DONE, flush=True)


def main(slots: str, *arguments: str) -> None:
    ways = arguments[: arguments.index("--")] if "--" in arguments else arguments
    group = arguments[len(ways) + 1 :]
    torch.set_num_threads(1 if group or slots == SIMULATED else int(slots))  # before anything that runs a backward
    devices = simulate(SLOTS) if slots == SIMULATED else [torch.device("cpu")] * int(slots)
    rank, ranks = 0, 1
    if group:
        rank, ranks, file, backend = int(group[0]), int(group[1]), group[2], group[3]
        if backend == COUNTED:
            register()
        dist.init_process_group(
            backend, init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=timedelta(minutes=2)
        )
    networks = {way: WAYS[way](model().to(devices[0]), devices) for way in ways}
    trainings = {way: Training(network, devices[0], rank, ranks) for way, network in networks.items()}
    steps = {way: training.step for way, training in trainings.items()}
    steps |= {way + OPTIMIZER: training.step_with_optimizer for way, training in trainings.items()}

    def save(path: str) -> None:
        """What each rank has, by way. All ranks have to be told to save."""
        found: list[Any] = [{way: training.found() for way, training in trainings.items()}] * ranks
        if ranks > 1:
            dist.all_gather_object(found, found[rank])
        if rank == 0:
            torch.save({way: [of_rank[way] for of_rank in found] for way in ways}, path)

    with torch.sim.clocks(False) if slots == SIMULATED else nullcontext():
        obey(steps, save)
    if group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
