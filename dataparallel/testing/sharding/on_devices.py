"""A list of devices of this process as what tensors are distributed over. `targets` chooses between this and a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dataparallel.devices import DeviceLike, resolve_each
from dataparallel.sharded import Replicate, ShardedTensor, distribute_tensor
from dataparallel.sharded.placements import Owners, Placement, over_of
from dataparallel.sharded.tensor import divided_like
from dataparallel.sharded.view import ShardedView
from dataparallel.testing.sharding.differences import same_bits

Placements: TypeAlias = tuple[Placement, ...]
"""How one tensor is distributed: a placement for each dimension of the mesh. A list of devices has one dimension."""


class OnDevices:
    """Sharded tensors of this library, over a list of devices, or over `Owners` on several machines.

    Over machines the methods that ``targets`` calls collective are.

    Attributes:
        parts: into how many parts each dimension is cut; a list of devices has one.
    """

    LETTERS = 300
    """Of what a machine says to the others."""

    def __init__(self, devices: Sequence[DeviceLike]) -> None:
        self.over = over_of(devices)
        self.devices = Owners(resolve_each(devices), self.over)
        self.parts = [len(self.devices) * (1 if self.over is None else self.over.size)]

    def __str__(self) -> str:
        machine = "" if self.over is None else f" of {self.over.describe()}"
        return f"{len(self.devices)} devices ({', '.join(map(str, self.devices))}){machine}"

    def can_carry(self, dtype: torch.dtype) -> bool:
        """Tensors of every dtype travel between devices."""
        return True

    def distribute(self, tensor: Tensor, placements: Placements) -> Tensor:
        """A leaf with the values of the tensor, in memory of its own."""
        return distribute_tensor(tensor, self.devices, placements[0])

    def holds(self, tensor: object) -> bool:
        """True if it is distributed."""
        return isinstance(tensor, ShardedTensor)

    def whole(self, tensor: Tensor) -> Tensor:
        """The full tensor on the CPU. A replicated one is the same on each device.

        Raises:
            AssertionError: replicated parts differ.
        """
        assert isinstance(tensor, ShardedTensor)
        full = tensor.full_tensor("cpu")
        if not isinstance(tensor, ShardedView) and isinstance(tensor.placement, Replicate):
            for place, part in enumerate(tensor.shards):
                if not same_bits(part.detach().cpu(), full):
                    raise AssertionError(f"the replica on device {place} differs from the one on device 0")
        return full

    def local(self, tensor: Tensor) -> list[Tensor]:
        """What this process has of it."""
        assert isinstance(tensor, ShardedTensor)
        return list(tensor.shards)

    def for_backward(self, output: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """What backward starts from, and with which gradient."""
        assert isinstance(output, ShardedTensor)
        if isinstance(output, ShardedView):
            return output, cotangent.to(output.device)
        return output, divided_like(cotangent, output)

    def is_refusal(self, error: Exception) -> bool:
        """True for the library's own errors that say what to do instead, and for what Python makes of them.

        They are: a ``NotImplementedError`` or ``TypeError`` that names ``full_tensor()``; a ``ValueError`` about
        different owners or placements; Python's ``TypeError`` about operands.
        """
        message = str(error)
        if isinstance(error, (NotImplementedError, TypeError)):
            return "full_tensor()" in message or "unsupported operand type(s)" in message
        return isinstance(error, ValueError) and "got sharded tensors with different" in message

    def codes_of_all(self, codes: Sequence[int]) -> list[list[int]]:
        """What each machine has seen."""
        if self.over is None:
            return [list(codes)]
        gathered: list[list[int]] = self.over.all_gather(torch.tensor(codes, dtype=torch.int64)).tolist()
        return gathered

    def texts_of_all(self, text: str) -> list[str]:
        """What each machine says, shortened if there are several."""
        if self.over is None:
            return [text]
        mine = text.encode("ascii", "replace")[: self.LETTERS].ljust(self.LETTERS)
        return [bytes(letters).decode("ascii").rstrip() for letters in self.codes_of_all(list(mine))]
