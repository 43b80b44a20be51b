"""Broadcasts and sums of buckets between devices, by each transport and route, as calls to be timed.

Checks that all of them give the same bits. This module times and judges nothing. That is done by
`test_transports.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataparallel.comm import kernels
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.kernels import Cupy
from dataparallel.comm.routes import STAR, Chain
from dataparallel.comm.transport import Transport
from pairs import Call

BROADCAST, SUM = "broadcast", "sum"
WAYS: dict[str, Transport] = {"star": STAR, "chain": Chain(), "host": ThroughHost(), "cupy": Cupy()}
COPIED_BYTES = 64 * 2**20
"""The size of the copy that bandwidths are compared with."""


@dataclass(frozen=True)
class Case:
    """``tensors`` tensors of one size on every device, which have ``nbytes`` bytes together."""

    work: str
    nbytes: int
    tensors: int


class Traffic:
    """One case on some devices, by every transport and route that serves them."""

    def __init__(self, case: Case, devices: Sequence[torch.device]) -> None:
        self.case, self.devices = case, list(devices)
        numel = max(1, case.nbytes // 4 // case.tensors)
        generator = torch.Generator().manual_seed(0)
        on_host = [torch.randn(numel, generator=generator) for _ in range(case.tensors)]
        places = self.devices if case.work == SUM else self.devices[:1]
        self.inputs = [[tensor.to(device) for tensor in on_host] for device in places]
        self.ways = [way for way in WAYS if way != "cupy" or kernels.why_not(self.devices) is None]

    def run(self, way: str) -> list[list[Tensor]]:
        if self.case.work == SUM:
            return [WAYS[way].reduce_add_coalesced(self.inputs, self.devices[0])]
        return WAYS[way].broadcast_coalesced(self.inputs[0], self.devices, own=False)

    def calls(self) -> list[Call]:
        return [lambda way=way: self.run(way) for way in self.ways]

    def check(self) -> None:
        """Raises `AssertionError` unless every way gives the bits of the star."""
        expected = self.run("star")
        for way in self.ways:
            for one, other in zip(self.run(way), expected, strict=True):
                for tensor, wanted in zip(one, other, strict=True):
                    assert tensor.device == wanted.device
                    assert torch.equal(tensor.cpu(), wanted.cpu()), way

    @property
    def moved(self) -> int:
        """Bytes read plus bytes written by the fewest transfers possible: one for each other device."""
        numbers = sum(tensor.numel() for tensor in self.inputs[0])
        return 2 * 4 * numbers * (len(self.devices) - 1)


def copy_between(one: torch.device, other: torch.device) -> tuple[Callable[[], object], int]:
    """A copy from the one device to the other, and its bytes read plus written."""
    source = torch.empty(COPIED_BYTES // 4, device=one)
    target = torch.empty(COPIED_BYTES // 4, device=other)
    return lambda: target.copy_(source), 2 * COPIED_BYTES
