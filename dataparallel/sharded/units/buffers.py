"""`Layout` says where a unit's parameters lie in flat buffers, `FullBuffer` is a slot's memory for full parameters.

`PeerTables` has the tables by which kernels that read peers gather parameters and sum gradients.

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
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.comm.kernels import ADDRESSES, SUM_KERNELS, DeviceTable
from dataparallel.comm.tables import Part, all_gather, reduce_scatter
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


DtypeGroup: TypeAlias = "tuple[list[int], Layout, torch.dtype]"
"""Parameters of one dtype: their positions in the unit, their layout, the dtype."""


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class Precision:
    """The dtypes of a unit. ``None`` means the dtype of the parameters, and for sums the dtype of the gradients."""

    parameters: torch.dtype | None = None
    sums: torch.dtype | None = None
    outputs: torch.dtype | None = None
    casts_inputs: bool = True

    def on_slots(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the full parameters for sharded parameters of ``dtype``."""
        return self.parameters or dtype if dtype.is_floating_point else dtype

    def of_sums(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which slots deliver gradients of parameters of ``dtype``."""
        return self.sums or self.on_slots(dtype) if dtype.is_floating_point else dtype

    def of_inputs(self, arguments: Any) -> Any:
        """Returns the arguments of a call, cast if they are to be."""
        return _cast(arguments, self.parameters) if self.casts_inputs else arguments

    def of_outputs(self, output: Any) -> Any:
        """Returns the output of a call, cast if it is to be."""
        return _cast(output, self.outputs)


def _cast(structure: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return structure
    return _torch.pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, structure)


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
        gathered: the matrix that has arrived, in the layout of its pieces, until `fill` copies from it; or ``None``.
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
        self.gathered: tuple[Tensor, Layout] | None = None
        self.free()

    def pull(self, pieces: Sequence[Tensor], first: int, layout: Layout) -> None:
        """Copies the pieces into a new matrix. Begins with piece ``first``, so that slots pull from distinct owners."""
        matrix = self._buffer.new_empty(layout.owners, layout.numel)
        rows = matrix if len(matrix) == len(pieces) else matrix.view(len(pieces), -1)  # several for a piece of machines
        order = [(first + i) % len(pieces) for i in range(len(pieces))]
        comm.copy_each([rows[i] for i in order], [pieces[i] for i in order])
        self.gathered = matrix, layout

    def pull_by(self, table: DeviceTable, pieces: Sequence[Tensor], layout: Layout) -> None:
        """Has a kernel pull the pieces straight into the buffer, which `allocate` has given memory."""
        table.launch([*pieces, self._buffer])
        layout.join_parts(self._buffer)

    def copy_from(self, other: FullBuffer) -> None:
        """Copies the full buffer of another slot into this one, which `allocate` has given memory."""
        comm.broadcast(other._buffer, out=[self._buffer])

    @property
    def flat(self) -> Tensor:
        """The memory, as bytes. Writes there change no version of a parameter."""
        return self._buffer.view(torch.uint8)

    @property
    def references(self) -> int:
        """See `_torch.tensors_on`."""
        return _torch.tensors_on(self._storage)

    def allocate(self) -> None:
        """Gives the parameters memory, unless they have some. `fill` gives them values."""
        if self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)

    def fill(self) -> Tensor | None:
        """Completes the parameters, and returns the matrix ``gathered``, which is not kept, if they came in one."""
        self.allocate()
        if self._versions:
            _torch.set_versions(tuple(self.tensors), self._versions)
        self._is_filled = True
        if self.gathered is None:  # the values are in the buffer
            return None
        (matrix, layout), self.gathered = self.gathered, None
        layout.copy_out(matrix, self._buffer)
        return matrix

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


Gradients: TypeAlias = "Tensor | Sequence[Tensor | None]"
"""What a slot delivers for parameters of one dtype. Most often kernels add the gradients where autograd left them.

Otherwise they are packed into a matrix in the layout of the gathered one, with a row for each owner on this machine.
Over machines a row has the parts of this owner on every machine. Without anything it is an empty tuple.
"""


def parts_of(layout: Layout) -> list[Part]:
    """Describes how the parameters of a layout are cut, for the plans of ``comm.tables``."""
    return [
        Part(columns.start, in_full, tuple(shape.numel() for shape in columns.shard_shapes))
        for columns, in_full in zip(layout.columns, layout.full_offsets, strict=True)
    ]


class _Sum(NamedTuple):
    """The sum of some parameters of one dtype for one owner, by one launch: of those from ``first`` up to ``end``."""

    first: int
    end: int
    parts: list[Part]
    table: DeviceTable


class PeerTables:
    """The tables of one unit, on the devices that launch them. Those of gathers are copied there, on current streams.

    Each owner needs a table for the sums of each dtype, and each slot one for each dtype that it gathers.

    A slot pulls its full parameters straight from the owners' shards by one launch. An owner sums its rows straight
    from where autograd left the gradients, by one launch too. Without such kernels pieces are packed and copied.

    ``gathered``, ``groups``: for each dtype all parameters, and those that need gradients.

    Attributes:
        summed: for each dtype of parameters that need gradients, the dtype of gradients that kernels add where they
            lie; ``None`` if they add none.
    """

    def __init__(
        self,
        slots: Sequence[torch.device],
        precision: Precision,
        gathered: Sequence[tuple[Layout, torch.dtype]],
        groups: Sequence[DtypeGroup],
    ) -> None:
        self._slots, self._precision, self._groups = slots, precision, groups
        self._dtypes = [precision.on_slots(dtype) for _, dtype in gathered]
        self._gathers: dict[tuple[int, int, int], DeviceTable] = {}
        for slot in range(len(slots)):
            for at, (layout, _) in enumerate(gathered):
                self.gather(slot, at, layout)
        self._sums: dict[tuple[int, int, torch.dtype], list[_Sum]] = {}
        self.summed = [self._dtype_summed(dtype) for _, _, dtype in groups]

    def _dtype_summed(self, dtype: torch.dtype) -> torch.dtype | None:
        """Returns the dtype in which gradients come if the sum only widens it, else the one in which slots deliver."""
        delivered, come = self._precision.of_sums(dtype), self._precision.on_slots(dtype)
        are_widened = torch.promote_types(come, delivered) == delivered
        may_be = [each for each in (come, delivered) if each == delivered or are_widened]
        return next((each for each in may_be if (each, added_in(delivered, dtype)) in SUM_KERNELS), None)

    def gather(self, slot: int, at: int, layout: Layout) -> DeviceTable:
        """Returns the table for dtype number ``at`` by which a slot pulls the pieces of a layout into its full buffer.

        A table for pieces of a group of slots is made when it is first asked for, on the slot's current stream.
        """
        key = slot, at, layout.owners
        if key not in self._gathers:
            plan = all_gather(parts_of(layout), slot % layout.owners)
            self._gathers[key] = DeviceTable(plan, self._slots[slot], self._dtypes[at])
        return self._gathers[key]

    def _sums_of(self, at: int, owner: int, summed: torch.dtype) -> list[_Sum]:
        """Returns the tables for an owner's sums of gradients of a dtype, made on the current stream of its device."""
        key = at, owner, summed
        if key not in self._sums:
            _, layout, dtype = self._groups[at]
            slots, parts = len(self._slots), parts_of(layout)
            at_once = (ADDRESSES - 2) // slots  # parameters of one launch
            target = added_in(self._precision.of_sums(dtype), dtype)
            self._sums[key] = []
            for first in range(0, len(parts), at_once):
                some = parts[first : first + at_once]
                table = DeviceTable(reduce_scatter(some, owner, slots), self._slots[owner], summed, target)
                self._sums[key].append(_Sum(first, first + len(some), some, table))
        return self._sums[key]

    def reduce_scatter(self, unit: str, at: int, delivered: Sequence[Gradients], totals: Sequence[Tensor]) -> None:
        """Adds each owner's rows of what the slots have delivered into its total, on the current streams.

        ``delivered``: of each slot. Where no slot has a gradient, totals stay as they are.
        """
        layout = self._groups[at][1]
        dtypes = {each.dtype if isinstance(each, Tensor) else self.summed[at] for each in delivered if len(each)}
        if len(dtypes) > 1:
            raise RuntimeError(
                f"some slots hold gradients of the unit {unit!r} since before this backward, and others do "
                "not know: call set_requires_gradient_sync() between passes of backward, not inside of one"
            )
        dtype = next(iter(dtypes), None)
        if dtype is None:
            return
        of_owners = [self._sums_of(at, owner, dtype) for owner in range(len(totals))]
        has_matrices = any(isinstance(each, Tensor) for each in delivered)
        for of_parameters in zip(*of_owners, strict=True):  # the same ones, for each owner
            first, end, parts, _ = of_parameters[0]
            terms: list[Tensor | None] = []
            for each in delivered:
                some = [each] * len(parts) if isinstance(each, Tensor) else each[first:end]
                terms += some or [None] * len(parts)  # a slot may have delivered nothing
            for owner, (found, total) in enumerate(zip(of_parameters, totals, strict=True)):
                if not has_matrices:
                    found.table.launch([*terms, total])
                    continue
                # In a matrix the owner's rows of all parameters follow each other.
                rows = [owner * layout.numel + part.in_shard - sum(part.counts[:owner]) for part in parts]
                shifts = [row if isinstance(each, Tensor) else 0 for each in delivered for row in rows]
                found.table.launch([*terms, total], [*shifts, 0])
