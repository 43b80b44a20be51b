"""Where the parameters of a unit lie in its flat buffers, and the copies between buffers of two layouts.

The buffers belong to others (``units.owned``, ``units.on_slot``, ``units.deliveries``): this file keeps none.

An owner's *flat shard* holds its part of each parameter, one after the other. All owners' flat shards have the same
size: a part counts with ``ceil(rows / owners)`` rows, also where the owner has fewer. So the flat shards of all owners,
one after the other, are a matrix with a row for each owner, the *gathered* matrix. A parameter is a range of its
columns. The *full* buffer of a slot holds the parameters themselves, each contiguous: its range of columns, copied out.

Over several machines the gathered matrix has a row for each owner on each of them. Those of one owner's number come one
after the other, in the order of the machines: so what owner j gathers from the other machines is one piece again.

The layout of per-parameter sharding follows FSDP2 (``torch.distributed.fsdp.fully_shard``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.sharded.placements import Shard, part_shapes

_ALIGNED_TO = 8
"""Elements. A part begins at a multiple, so that kernels can read 16 bytes at a time also in 16-bit types."""


@dataclass(frozen=True)
class Place:
    """One parameter's range of columns.

    Attributes:
        shape: of the whole parameter.
        dim: along which it is cut.
        part_shapes: for each owner, without padding.
        start, numel: the first column, and how many there are: the elements of a part with padding.
        padding: columns after it that belong to no parameter.
    """

    shape: torch.Size
    dim: int
    part_shapes: tuple[torch.Size, ...]
    start: int
    numel: int
    padding: int

    @cached_property
    def is_even(self) -> bool:
        """True if all owners have parts of one size, which fill their columns."""
        return all(part.numel() == self.numel for part in self.part_shapes)


class Layout:
    """The layout of parameters of one dtype for a number of owners.

    Args:
        shapes, placements: of the parameters.
        owners: how many on this machine.
        full_offsets: where each parameter begins in a full buffer, if that was laid out for a multiple of ``owners``.
        machines, machine: over how many machines parameters are sharded, with as many owners on each, and which of
            them this one is.

    Attributes:
        places: one for each parameter.
        numel: columns of the gathered matrix, which are the elements of a flat shard.
        owners: its rows: all owners, on all machines.
        full_offsets: where each parameter begins in a full buffer, which has ``owners * numel`` elements.
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
        here = range(machine, owners * machines, machines)
        owners *= machines
        self.owners, self.numel = owners, 0
        self.places: list[Place] = []
        for shape, placement in zip(shapes, placements, strict=True):
            parts = part_shapes(shape, placement, owners)
            numel = parts[0].numel()
            padding = -numel % _ALIGNED_TO
            self.places.append(Place(shape, placement.dim, tuple(parts), self.numel, numel, padding))
            self.numel += numel + padding
        self._views = [
            [(place.part_shapes[owner], _contiguous(place.part_shapes[owner]), place.start) for place in self.places]
            for owner in here
        ]
        self.full_offsets = [owners * p.start for p in self.places] if full_offsets is None else [*full_offsets]
        # Of a full buffer: where the columns of each parameter and its padding begin, and how many there are.
        self._blocks: list[tuple[int, int]] = []
        for place, start in zip(self.places, self.full_offsets, strict=True):
            self._blocks += [(start, place.numel)] if place.numel else []
            self._blocks += [(start + owners * place.numel, place.padding)] if place.padding else []

    def parts_of(self, flat: Tensor, owner: int) -> list[Tensor]:
        """The part of each parameter that an owner on this machine has, as views of its flat shard."""
        offset = flat.storage_offset()
        # One operator for each: backward asks for a view of every gradient at every owner.
        return [flat.as_strided(size, stride, offset + start) for size, stride, start in self._views[owner]]

    def pack(self, flat: Tensor, parts: Sequence[Tensor], owner: int) -> None:
        """Copies the owner's part of each parameter into its flat shard."""
        for view, part in zip(self.parts_of(flat, owner), parts, strict=True):
            view.copy_(part)

    def copy_out(self, gathered: Tensor, full: Tensor) -> None:
        """Copies the gathered matrix into the full buffer of a slot."""
        offset = full.storage_offset()
        targets = [full.as_strided((self.owners, size), (size, 1), offset + start) for start, size in self._blocks]
        torch.split_with_sizes_copy(gathered, [size for _, size in self._blocks], dim=1, out=targets)
        for place, start in zip(self.places, self.full_offsets, strict=True):
            if place.dim:
                self._join_parts(place, full, start)

    def _join_parts(self, place: Place, full: Tensor, start: int) -> None:
        """Makes a parameter that is cut along another dimension than 0 contiguous: its parts lie one after another."""
        numel = prod(place.shape)
        region = full[start : start + numel]
        parts = region.clone().view(self.owners, *place.part_shapes[0])
        torch.cat([*parts], place.dim, out=region.view(place.shape))

    def copy_in(self, grads: Sequence[Tensor | None], gathered: Tensor) -> None:
        """Copies gradients of whole parameters into the gathered matrix, and zeros where there is none.

        It is one operator, which casts too. On CUDA it is one kernel where the gradients are contiguous.
        """
        like = next((grad for grad in grads if grad is not None), None)
        if like is None:
            gathered.zero_()
            return
        columns: list[Tensor] = []
        zeros: dict[int, Tensor] = {}  # for each number of columns: parameters of like shapes share them
        for grad, place in zip(grads, self.places, strict=True):
            for numel, values in ((place.numel, grad), (place.padding, None)):
                if numel and values is not None:
                    columns.append(self._rows_of(values, place))
                elif numel:
                    if numel not in zeros:
                        zeros[numel] = like.new_zeros(self.owners, numel)
                    columns.append(zeros[numel])
        if columns:  # else all parameters are empty
            _torch.chunk_cat(columns, 0, self.owners, out=gathered)

    def _rows_of(self, grad: Tensor, place: Place) -> Tensor:
        """A gradient with a row for each of its own, or, if it has even parts, for each owner."""
        if place.dim:
            grad = torch.stack(grad.chunk(self.owners, place.dim))
        return grad.reshape(self.owners if place.is_even else len(grad) if grad.dim() else 1, -1)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
