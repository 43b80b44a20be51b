"""`Layout` says where a unit's parameters lie in flat buffers, `FullBuffer` is a slot's memory for full parameters.

An owner's *flat shard* holds its shard of each parameter. The flat shards of all owners are the rows of the *gathered*
matrix, where a parameter is a range of columns. A *full* buffer holds the parameters themselves, each contiguous. The
layout of per-parameter sharding follows FSDP2 (``torch.distributed.fsdp.fully_shard``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.comm.kernels import DeviceTable
from dataparallel.replicas.stamp import layouts_of
from dataparallel.sharded.placements import Shard, shard_shapes

_ALIGNED_TO = 8
"""Elements. A part begins at a multiple, so that kernels can read 16 bytes at a time also in 16-bit types."""


@dataclass(frozen=True)
class Columns:
    """One parameter's range of columns: ``numel`` from ``start`` on, and ``padding`` more that belong to no parameter.

    ``dim``: the dimension along which it is cut. ``shard_shapes``: the shape of each owner's part, without padding.
    """

    shape: torch.Size
    dim: int
    shard_shapes: tuple[torch.Size, ...]
    start: int
    numel: int
    padding: int

    @cached_property
    def is_even(self) -> bool:
        """True if all owners have parts of one size, which fill their columns."""
        return all(part.numel() == self.numel for part in self.shard_shapes)


class Layout:
    """The layout of parameters of one dtype over some owners.

    Each part takes the columns of ``ceil(rows / owners)`` rows of its parameter, even if it has fewer rows, so all flat
    shards have one size. Over machines the rows of all owners with one number follow each other, as one piece.

    Args:
        shapes, placements: of the parameters.
        owners: how many owners each of the ``machines`` has. This machine is number ``machine``.
        full_offsets: where each parameter begins in a full buffer, if that was laid out for a multiple of ``owners``.

    Attributes:
        numel: the columns of the gathered matrix, which are the elements of a flat shard.
        owners: the rows of the matrix: all owners on all machines. A full buffer has ``owners * numel`` elements.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        placements: Sequence[Shard],
        owners: int,
        full_offsets: Sequence[int] | None = None,
        machines: int = 1,
        machine: int = 0,
    ) -> None:
        rows_here = range(machine, owners * machines, machines)
        owners *= machines
        self.owners, self.numel = owners, 0
        self.columns: list[Columns] = []
        for shape, placement in zip(shapes, placements, strict=True):
            parts = shard_shapes(shape, placement, owners)
            numel = parts[0].numel()
            padding = -numel % _ALIGNED_TO
            self.columns.append(Columns(shape, placement.dim, tuple(parts), self.numel, numel, padding))
            self.numel += numel + padding
        self._views = [
            [(each.shard_shapes[owner], _contiguous(each.shard_shapes[owner]), each.start) for each in self.columns]
            for owner in rows_here
        ]
        self.full_offsets = [owners * p.start for p in self.columns] if full_offsets is None else [*full_offsets]
        # In a full buffer: where the columns of each parameter, and of its padding, begin, and how many they are.
        self._blocks: list[tuple[int, int]] = []
        for columns, start in zip(self.columns, self.full_offsets, strict=True):
            self._blocks += [(start, columns.numel)] if columns.numel else []
            self._blocks += [(start + owners * columns.numel, columns.padding)] if columns.padding else []

    def parts_of(self, flat: Tensor, owner: int) -> list[Tensor]:
        """Returns an owner's part of each parameter, as views of its flat shard. The owner is on this machine."""
        offset = flat.storage_offset()
        # One operator for each view, because backward makes one of every gradient at every owner.
        return [flat.as_strided(size, stride, offset + start) for size, stride, start in self._views[owner]]

    def pack(self, flat: Tensor, parts: Sequence[Tensor], owner: int) -> None:
        for view, part in zip(self.parts_of(flat, owner), parts, strict=True):
            view.copy_(part)

    def zero_columns(self, number: int, matrix: Tensor) -> None:
        """Zeros a parameter's columns in a matrix of the layout, or in a flat shard."""
        columns = self.columns[number]
        matrix[..., columns.start : columns.start + columns.numel].zero_()

    def copy_out(self, gathered: Tensor, full: Tensor) -> None:
        """Copies the gathered matrix into the full buffer of a slot."""
        offset = full.storage_offset()
        targets = [full.as_strided((self.owners, size), (size, 1), offset + start) for start, size in self._blocks]
        torch.split_with_sizes_copy(gathered, [size for _, size in self._blocks], dim=1, out=targets)
        self.join_parts(full)

    def join_parts(self, full: Tensor) -> None:
        """Joins the parts of parameters that are cut along another dimension than 0, which follow each other."""
        for columns, start in zip(self.columns, self.full_offsets, strict=True):
            if columns.dim:
                region = full[start : start + prod(columns.shape)]
                parts = region.clone().view(self.owners, *columns.shard_shapes[0])
                torch.cat([*parts], columns.dim, out=region.view(columns.shape))

    def copy_in(self, grads: Sequence[Tensor | None], gathered: Tensor) -> None:
        """Copies gradients of full parameters into the gathered matrix by one operator, which casts too.

        Zeros stand for missing ones. On CUDA it is one kernel if the gradients are contiguous.
        """
        like = next((grad for grad in grads if grad is not None), None)
        if like is None:
            gathered.zero_()
            return
        rows: list[Tensor] = []
        zeros: dict[int, Tensor] = {}  # by their number of columns, because parameters share them
        for grad, columns in zip(grads, self.columns, strict=True):
            for numel, values in ((columns.numel, grad), (columns.padding, None)):
                if numel and values is not None:
                    rows.append(self._rows_of(values, columns))
                elif numel:
                    if numel not in zeros:
                        zeros[numel] = like.new_zeros(self.owners, numel)
                    rows.append(zeros[numel])
        if rows:  # else all parameters are empty
            _torch.chunk_cat(rows, 0, self.owners, out=gathered)

    def _rows_of(self, grad: Tensor, columns: Columns) -> Tensor:
        """Returns a gradient as a matrix: a row for each owner if the parts are even, else for each row of its own."""
        if columns.dim:
            grad = torch.stack(grad.chunk(self.owners, columns.dim))
        return grad.reshape(self.owners if columns.is_even else len(grad) if grad.dim() else 1, -1)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


def added_in(summed: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the sum, which has 32 bits for 16-bit numbers."""
    wide = torch.promote_types(summed, dtype)
    return torch.float32 if wide.itemsize < 4 and wide.is_floating_point else wide


@contextmanager
def naming_out_of_memory(what: str, unit: str, device: torch.device, number_of_bytes: int) -> Iterator[None]:
    """Wraps allocations: if memory is short, says that ``device`` has no room for ``what`` of a unit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{device} has no room for the {number_of_bytes:,} bytes of {what} of the unit {unit!r}: shard smaller "
            f"units, prefetch less, or use more devices. {error}"
        ) from error


class FullBuffer:
    """The full parameters of one dtype on one slot, whose storage has no bytes at first.

    Attributes:
        tensors: the parameters, views of one storage. Reading them while it has no bytes crashes the process.
        gathered: the matrix that has arrived, until `fill` copies from it; or ``None``.
        nbytes: the size of the memory, while there is some.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self._buffer = torch.empty(layout.owners * layout.numel, dtype=dtype, device=device)
        self._storage = self._buffer.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self.tensors: list[Tensor] = []
        for columns, offset in zip(layout.columns, layout.full_offsets, strict=True):
            tensor = torch.empty(0, dtype=dtype, device=device)
            self.tensors.append(tensor.set_(self._storage, offset, columns.shape, _contiguous(columns.shape)))
        self._memory = [tensor.data for tensor in self.tensors]
        self._versions: tuple[int, ...] = ()
        self._is_filled = True
        self.gathered: Tensor | None = None
        self._layout_of_gathered: Layout | None = layout  # `None`: it is a copy of a full buffer
        self.free()

    def pull(self, pieces: Sequence[Tensor], first: int, layout: Layout | None = None) -> None:
        """Copies the pieces into a new matrix. Begins with piece ``first``, so that slots pull from distinct owners."""
        self._layout_of_gathered = layout = layout or self.layout
        matrix = self._buffer.new_empty(layout.owners, layout.numel)
        rows = matrix if len(matrix) == len(pieces) else matrix.view(len(pieces), -1)  # several for a piece of machines
        order = [(first + i) % len(pieces) for i in range(len(pieces))]
        comm.copy_each([rows[i] for i in order], [pieces[i] for i in order])
        self.gathered = matrix

    def pull_by(self, table: DeviceTable, pieces: Sequence[Tensor], layout: Layout) -> None:
        """Has a kernel pull the pieces straight into the buffer, which `allocate` has given memory."""
        table.launch([*pieces, self._buffer])
        self._layout_of_gathered = layout

    def set_gathered(self, gathered: Tensor, is_matrix: bool = True) -> None:
        """Takes over a matrix, or a copy of another slot's full buffer, for `fill`."""
        self._layout_of_gathered, self.gathered = self.layout if is_matrix else None, gathered

    def copy_to(self, device: torch.device) -> Tensor:
        """Returns a copy of the full buffer on the device of another slot, for `set_gathered` there."""
        copied = torch.empty_like(self._buffer, device=device)
        comm.broadcast(self._buffer, out=[copied])
        return copied

    @property
    def flat(self) -> Tensor:
        """The memory, as bytes. Writes there change no version of a parameter."""
        return self._buffer.view(torch.uint8)

    def allocate(self) -> None:
        """Gives the parameters memory, unless they have some. `fill` gives them values."""
        if self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)

    def fill(self) -> Tensor | None:
        """Completes the parameters, and returns the matrix ``gathered``, which is not kept, if they came in one."""
        self.allocate()
        if self._versions:
            _torch.set_versions(tuple(self.tensors), self._versions)
        gathered, self.gathered = self.gathered, None
        layout, self._is_filled = self._layout_of_gathered, True
        if gathered is None:
            assert layout is not None  # kernels have pulled straight into the buffer
            layout.join_parts(self._buffer)
        elif layout is None:
            self._buffer.copy_(gathered)
        else:
            layout.copy_out(gathered, self._buffer)
        return gathered

    def free(self, keeps_memory: bool = False) -> None:
        """Frees the memory, or only the values in it, and any memory that ``forward`` has given to a parameter instead.

        A backward that reads the parameters now raises, because their versions have moved.
        """
        if self._is_filled:
            if layouts_of(self.tensors) != layouts_of(self._memory):
                for tensor, memory in zip(self.tensors, self._memory, strict=True):
                    tensor.data = memory
            self._versions = tuple(map(_torch.version_of, self.tensors))
            torch.autograd.graph.increment_version(self.tensors)
        if not keeps_memory:
            self._storage.resize_(0)
        self._is_filled = False
