"""What tensors are distributed over: a list of devices of this process, or a mesh of ranks.

`OnDevices` makes this library's sharded tensors, `OnMesh` torch's DTensors. Everything that differs between the two is
in their files: how a tensor is distributed and joined, which errors are refusals, and how ranks tell each other what
they have seen. The methods of `OnMesh` that say so are collective: all ranks of the mesh call them, in the same order.

``on_devices`` is imported when it is needed: the library's sharded tensors need ``torch.distributed.tensor``, and a
torch without it gets a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor

from dataparallel.devices import DeviceLike
from dataparallel.testing.ranks.slots import choose_devices

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dataparallel.testing.sharding.on_devices import OnDevices, Placements


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
        from torch.distributed.tensor import Shard

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
        from torch.distributed.tensor import DTensor, Shard

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
        RuntimeError: this torch has no ``torch.distributed.tensor``.
    """
    try:
        from dataparallel.testing.sharding.on_devices import OnDevices
    except ImportError as error:
        raise RuntimeError(
            f"tensors are sharded with the placements of torch.distributed.tensor, which torch {torch.__version__} "
            f"cannot import ({error}): use another build of torch"
        ) from error
    if devices is None:
        return OnDevices(choose_devices(2))
    if torch.distributed.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(devices, DeviceMesh):
            return OnMesh(devices)
    if isinstance(devices, (str, torch.device, int)):
        raise TypeError(f"operators are checked over a list of devices or a DeviceMesh; got {devices!r}: pass a list")
    return OnDevices(cast("Sequence[DeviceLike]", devices))
