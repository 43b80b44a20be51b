"""How NCCL is launched: behind the staging's event, on a stream of its own, one launch at a time in this process.

Simulated devices stand in for CUDA devices, and a function for NCCL's all-reduce. It has not run on GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from dataparallel.comm import nccl
from dataparallel.machines.backend import Group
from dataparallel.machines.collectives import all_reduce
from dataparallel.machines.group import Machines
from dataparallel.machines.staging import stage
from dataparallel.streams.current import Event
from machine_ranks import on_machines


class Work:
    """NCCL's: it runs on a stream of its own, and `wait` makes the current stream wait for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        launching = torch.accelerator.current_stream(tensor.device)
        self.stream = torch.Stream(tensor.device)
        Event(launching).make_wait(self.stream)
        with self.stream:
            tensor.mul_(2)
        self.event = Event(self.stream)

    def wait(self) -> None:
        self.event.make_wait(torch.accelerator.current_stream())


def launches(rank: int, devices: list[torch.device]) -> None:
    seen: list[Any] = []

    def stand_in(tensor: torch.Tensor, *_: object, **__: object) -> Work:
        seen.append((nccl.launching().locked(), torch.accelerator.current_stream(tensor.device)))
        return Work(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "is_nccl", lambda self, device: True)
        patch.setattr(distributed, "all_reduce", stand_in)
        machines = Machines.of(None)
        group = Group(machines.group)
        side = torch.Stream(devices[0])
        with side:  # what computes is not the stream that takes the result
            flat = torch.ones(1000, device=devices[0]) * 3
            staged = stage(group, flat)
        transfer = all_reduce(group, staged)
        assert transfer.wait().add(1).tolist() == [7] * 1000
    ((is_locked, stream),) = seen
    assert is_locked
    assert stream not in (side, torch.accelerator.current_stream(devices[0]))
    assert not nccl.launching().locked()


@pytest.mark.devices("sim")
def test_nccl_is_launched_in_order() -> None:
    on_machines(launches)
