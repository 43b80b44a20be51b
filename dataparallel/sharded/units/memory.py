"""The memory of one slot for a unit's parameters: it comes when they are gathered, and goes when they are freed.

``units.on_slot`` says when that is, and orders the streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.replicas.kept_values import MemoryOfCopies
from dataparallel.sharded.units.layout import Layout


def no_room_for(
    what: str, unit: str, device: torch.device, number_of_bytes: int, error: torch.OutOfMemoryError
) -> torch.OutOfMemoryError:
    """The error to raise from ``error``: ``device`` has no room for ``what`` of a unit, which takes so many bytes."""
    return torch.OutOfMemoryError(
        f"{device} has no room for the {number_of_bytes:,} bytes of {what} of the unit {unit!r}: shard smaller units, "
        f"prefetch less, or use more devices. {error}"
    )


@contextmanager
def named_if_no_room(what: str, unit: str, device: torch.device, number_of_bytes: int) -> Iterator[None]:
    """Around allocations for a unit on a device. Arguments are those of `no_room_for`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise no_room_for(what, unit, device, number_of_bytes, error) from error


class FullBuffer:
    """The parameters of one dtype on one slot, without bytes at first.

    Args:
        layout: of the matrix that is gathered from the owners.
        dtype, device: of the parameters on the slot.

    Attributes:
        tensors: the parameters, views of one storage. To read them while it has no bytes crashes the process.
        gathered: the matrix that `pull` has filled and `fill` has not copied, or `None`.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self._buffer = torch.empty(layout.owners * layout.numel, dtype=dtype, device=device)
        self._storage = self._buffer.untyped_storage()
        self._bytes = self._storage.nbytes()
        self.tensors: list[Tensor] = []
        for place, offset in zip(layout.places, layout.full_offsets, strict=True):
            tensor = torch.empty(0, dtype=dtype, device=device)
            stride = torch.empty(place.shape, device="meta").stride()
            self.tensors.append(tensor.set_(self._storage, offset, place.shape, stride))
        self._memory = MemoryOfCopies(self.tensors)
        self._versions: tuple[int, ...] = ()
        self.gathered: Tensor | None = None
        self._gathered_as: Layout | None = layout
        self.free()

    def pull(self, pieces: Sequence[Tensor], first: int, layout: Layout | None = None) -> None:
        """Copies the pieces into a new matrix, beginning with piece ``first``: so slots pull from distinct owners.

        ``layout``: of the pieces; default the owners'.
        """
        self._gathered_as = layout = layout or self.layout
        made = self._buffer.new_empty(layout.owners, layout.numel)
        rows = made if len(made) == len(pieces) else made.view(len(pieces), -1)  # over machines a piece has several
        order = [(first + i) % len(pieces) for i in range(len(pieces))]
        comm.copy_each([rows[i] for i in order], [pieces[i] for i in order])
        self.gathered = made

    def take(self, gathered: Tensor, is_matrix: bool = True) -> None:
        """Takes what has arrived: a matrix, or a copy of the full buffer of another slot."""
        self._gathered_as, self.gathered = self.layout if is_matrix else None, gathered

    def copy_to(self, device: torch.device) -> Tensor:
        """A copy of the full buffer on the device of another slot, for `take` there."""
        copied = torch.empty_like(self._buffer, device=device)
        comm.broadcast(self._buffer, out=[copied])
        return copied

    def fill(self) -> Tensor:
        """Copies the parameters out of the matrix, and returns that."""
        assert self.gathered is not None
        self._storage.resize_(self._bytes)
        if self._versions and _torch.set_versions:
            _torch.set_versions(tuple(self.tensors), self._versions)
        if self._gathered_as is None:
            self._buffer.copy_(self.gathered)
        else:
            self._gathered_as.copy_out(self.gathered, self._buffer)
        gathered, self.gathered = self.gathered, None
        return gathered

    def free(self) -> None:
        """Frees the memory, and what ``forward`` has given to a parameter instead.

        A backward that reads the parameters now raises, because their versions have moved.
        """
        if self._storage.nbytes():
            self._memory.restore()
            self._storage.resize_(0)
            if _torch.set_versions:
                self._versions = tuple(map(_torch.version_of, self.tensors))
                torch.autograd.graph.increment_version(self.tensors)
