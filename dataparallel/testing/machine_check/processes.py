"""Times steps of DDP and of FSDP2 in a process for each device, which torch.multiprocessing starts."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessException, start_processes

from dataparallel.testing.machine_check.checks import CheckedMachine, NotHere
from dataparallel.testing.machine_check.trained_models import BY_NAME, TrainedModel

_START = 60.0  # seconds that processes may take to start and to find each other
_WARM_UP = 3


def timed_in_processes(
    model: TrainedModel, machine: CheckedMachine, seconds: float, directory: Path
) -> Mapping[str, list[float]]:
    """Seconds of steps of each way, for about ``seconds`` each. ``directory`` is empty, and takes what ranks write.

    Raises:
        NotHere: there is one GPU, or torch has no process groups; or a process has failed, or they took too long.
    """
    kind = machine.root.type
    ranks = len(machine.devices) if kind == "cuda" else len(machine.slots)
    if kind not in ("cuda", "cpu"):
        raise NotHere(f"torch.distributed has no backend for {machine.root}")
    if ranks < 2:
        raise NotHere("there is one GPU, and a process needs one of its own")
    if not dist.is_available():
        raise NotHere("this build of torch has no torch.distributed")
    arguments = (ranks, kind, model.name, seconds, str(directory))
    started = start_processes(_rank, arguments, nprocs=ranks, join=False, start_method="spawn")
    ends = time.monotonic() + min(_START + 2 * seconds, max(machine.seconds_left(), 1.0))
    try:
        while not started.join(timeout=0.2):
            if time.monotonic() > ends:
                raise NotHere("DDP and FSDP2 had not ended when the time was over")
    except ProcessException as error:
        raise NotHere(f"a process of DDP or FSDP2 has failed: {str(error).strip().splitlines()[-1]}") from error
    finally:
        for process in started.processes:
            process.kill()
    found: Mapping[str, list[float]] = json.loads((directory / "times").read_text(encoding="utf-8"))
    return found


def _rank(rank: int, ranks: int, kind: str, model_name: str, seconds: float, directory: str) -> None:
    warnings.simplefilter("ignore")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{directory}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_START + 2 * seconds),
    )
    model = BY_NAME[model_name]
    found = {name: _times(make, model, device, seconds) for name, make in _WAYS.items()}
    if rank == 0:
        (Path(directory) / "times").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # threads of gloo and of DDP still run, and the process would end by an abort


def _by_ddp(module: nn.Module, device: torch.device) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, [device.index] if device.type == "cuda" else None)


def _by_fsdp2(module: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in [each for each in module.modules() if isinstance(each, nn.ModuleList)]:
        for child in block:
            fully_shard(child)
    fully_shard(module)
    return module


_WAYS: Mapping[str, Callable[[nn.Module, torch.device], nn.Module]] = {"DDP": _by_ddp, "FSDP2": _by_fsdp2}


def _times(
    make: Callable[[nn.Module, torch.device], nn.Module], model: TrainedModel, device: torch.device, seconds: float
) -> list[float]:
    """Seconds of each step on this rank. All ranks make as many steps: rank 0 says when to end."""
    module = make(model.model(device), device)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    inputs, targets = model.batch(1, torch.device("cpu"))
    found: list[float] = []
    goes_on, ends = torch.ones(1, device=device), time.monotonic() + seconds
    while goes_on.item():
        begin = time.perf_counter()
        optimizer.zero_grad()
        module(inputs.to(device), targets.to(device)).mean().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
        goes_on.fill_(len(found) < _WARM_UP + 5 or (time.monotonic() < ends and len(found) < _WARM_UP + 50))
        dist.broadcast(goes_on, 0)
    return found[_WARM_UP:]
