"""What tensors are distributed over: a list of devices of this process, or a mesh of ranks.

`OnDevices` makes this library's sharded tensors, `OnMesh` torch's DTensors. Everything that differs between the two is
in this file: how a tensor is distributed and joined, which errors are refusals, and how ranks tell each other what they
have seen. The methods of `OnMesh` that say so are collective: every rank of the mesh calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor

from dataparallel.devices import DeviceLike, resolve_each
from dataparallel.sharded import Replicate, Shard, ShardedTensor, distribute_tensor
from dataparallel.testing.ranks.slots import choose_devices
from dataparallel.testing.sharding.choices import Placements

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["OnDevices", "OnMesh", "Target", "same_bits", "target_of"]


class OnDevices:
    """Sharded tensors of this library, over a list of devices.

    Attributes:
        parts: into how many parts each dimension is cut; a list of devices has one.
    """

    def __init__(self, devices: Sequence[DeviceLike]) -> None:
        self.devices = resolve_each(devices)
        self.parts = [len(self.devices)]

    def __str__(self) -> str:
        return f"{len(self.devices)} devices ({', '.join(map(str, self.devices))})"

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
        if isinstance(tensor.placement, Replicate):
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
        return output, distribute_tensor(cotangent, output.devices, output.placement)

    def is_refusal(self, error: Exception) -> bool:
        """True for the library's own errors that say what to do instead, and for what Python makes of them.

        They are: a ``TypeError`` that names ``full_tensor()``; the same as a ``RuntimeError`` where an operator would
        write to a plain tensor; a ``ValueError`` about different owners or placements; Python's ``TypeError`` about
        operands.
        """
        message = str(error)
        if isinstance(error, TypeError):
            return "full_tensor()" in message or "unsupported operand type(s)" in message
        if isinstance(error, ValueError):
            return "got sharded tensors with different" in message
        return isinstance(error, RuntimeError) and "to a plain tensor; use full_tensor()" in message

    def codes_of_all(self, codes: Sequence[int]) -> list[list[int]]:
        """What each rank has seen: there is one."""
        return [list(codes)]

    def texts_of_all(self, text: str) -> list[str]:
        """What each rank says: there is one."""
        return [text]


class OnMesh:
    """torch's DTensors, over a mesh of ranks. Every rank passes the same values; nothing is sent to distribute them.

    Attributes:
        parts: the size of each dimension of the mesh.
    """

    REFUSALS = (
        "Sharding propagation failed",
        "does not have a sharding strategy registered",
        "got mixed torch.Tensor and DTensor",
        "in-place operations that require placement changes",
        "not supported with DTensor",
    )
    """Words of the RuntimeErrors with which torch refuses an operator. A NotImplementedError needs none."""

    LETTERS = 300
    """Of what a rank says to the others."""

    USUAL = frozenset(
        [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8]
    )
    """Dtypes that every backend carries."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.parts = list(mesh.shape)
        self._carried: dict[torch.dtype, bool] = dict.fromkeys(self.USUAL, True)

    def __str__(self) -> str:
        return f"a mesh of {' x '.join(map(str, self.parts))} ranks ({self.mesh.device_type})"

    def can_carry(self, dtype: torch.dtype) -> bool:
        """Whether the mesh's backend carries this dtype; the first question is a small collective."""
        if dtype not in self._carried:
            probe = torch.zeros(self.mesh.size(), dtype=torch.uint8).to(dtype)
            try:
                self.whole(self.distribute(probe, (Shard(0),) * self.mesh.ndim))
            except (RuntimeError, TypeError, ValueError):  # on every rank: it depends on nothing else
                self._carried[dtype] = False
            else:
                self._carried[dtype] = True
        return self._carried[dtype]

    def distribute(self, tensor: Tensor, placements: Placements) -> Tensor:
        """A leaf with the values of the tensor, in memory of its own."""
        from torch.distributed import tensor as dtensor

        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return dtensor.distribute_tensor(copied, self.mesh, list(placements), src_data_rank=None)

    def holds(self, tensor: object) -> bool:
        """True if it is distributed."""
        from torch.distributed.tensor import DTensor

        return isinstance(tensor, DTensor)

    def whole(self, tensor: Tensor) -> Tensor:
        """The full tensor on the CPU; collective."""
        full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        return full.cpu()

    def local(self, tensor: Tensor) -> list[Tensor]:
        """What this rank has of it."""
        return [tensor.detach().to_local()]  # type: ignore[attr-defined]

    def for_backward(self, output: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """What backward starts from, and with which gradient; collective."""
        full: Tensor = output.full_tensor()  # type: ignore[attr-defined]
        return full, cotangent.to(full.device)

    def is_refusal(self, error: Exception) -> bool:
        """True for a ``NotImplementedError``, and for a ``RuntimeError`` with one of `REFUSALS`."""
        if isinstance(error, NotImplementedError):
            return True
        return isinstance(error, RuntimeError) and any(words in str(error) for words in self.REFUSALS)

    def codes_of_all(self, codes: Sequence[int]) -> list[list[int]]:
        """What each rank of the mesh has seen, in the mesh's order; collective."""
        from torch.distributed.tensor import DTensor

        mine = torch.tensor([list(codes)], dtype=torch.int64, device=self.mesh.device_type)
        placements = [Shard(0)] * self.mesh.ndim
        gathered: list[list[int]] = (
            DTensor.from_local(mine, self.mesh, placements, run_check=False).full_tensor().tolist()
        )
        return gathered

    def texts_of_all(self, text: str) -> list[str]:
        """What each rank says, shortened; collective."""
        mine = text.encode("ascii", "replace")[: self.LETTERS].ljust(self.LETTERS)
        return [bytes(letters).decode("ascii").rstrip() for letters in self.codes_of_all(list(mine))]


Target: TypeAlias = "OnDevices | OnMesh"


def target_of(devices: Sequence[DeviceLike] | DeviceMesh | None) -> Target:
    """The target for a caller's argument. ``None`` means two accelerators if there are, else two slots on the CPU.

    Raises:
        TypeError, ValueError: as ``devices.resolve_each``.
    """
    if devices is None:
        return OnDevices(choose_devices(2))
    if torch.distributed.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(devices, DeviceMesh):
            return OnMesh(devices)
    if isinstance(devices, (str, torch.device, int)):
        raise TypeError(f"operators are checked over a list of devices or a DeviceMesh; got {devices!r}: pass a list")
    return OnDevices(cast("Sequence[DeviceLike]", devices))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two dense tensors have the same shape, dtype and bits. NaNs are equal to themselves."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).resolve_conj().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(flat[0], flat[1])
