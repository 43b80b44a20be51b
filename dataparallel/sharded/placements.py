"""How a tensor is divided among devices, and who owns the parts.

Placements are ``torch.distributed.tensor``'s own classes, so that they compare equal to those that users have. Owners
are devices of this machine, and with `Owners` those of other machines too: a tensor over M machines with N owners on
each has ``N * M`` parts, of which part ``j * M + m`` belongs to owner ``j`` of machine ``m``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch.distributed.tensor import Replicate as Replicate
from torch.distributed.tensor import Shard as Shard

from dataparallel.devices import CPU, current_device, resolve_each

if TYPE_CHECKING:
    from dataparallel.machines.group import Machines

T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """What views of a divided tensor have: a given number of rows for each part, over all machines."""

    dim: int
    rows: tuple[int, ...]


Placement: TypeAlias = "Shard | Replicate"
"""What users give."""

Division: TypeAlias = "Placement | Rows"
"""What tensors have."""


def check_placement(placement: object, shape: Sequence[int]) -> Placement:
    """The placement, with a dimension that is not negative.

    Raises:
        TypeError: it is neither a `Shard` nor a `Replicate`.
        ValueError: a tensor of this shape has no such dimension.
    """
    if isinstance(placement, Replicate):
        return placement
    # Exactly `Shard`: its subclasses divide in other ways.
    if type(placement) is not Shard:
        raise TypeError(f"a placement is Shard(dim) or Replicate() of torch.distributed.tensor; got {placement!r}")
    dim, dims = placement.dim, max(len(shape), 1)
    if not -dims <= dim < dims:
        raise ValueError(f"cannot place a tensor of shape {tuple(shape)} by {placement!r}: it has no such dimension")
    return Shard(dim % dims)


def rows_of_parts(rows: int, parts: int) -> list[int]:
    """How many of ``rows`` each of ``parts`` devices owns, as ``torch.chunk`` cuts: the last ones fewer, or none."""
    each = -(-rows // parts)
    return [max(0, min(each, rows - i * each)) for i in range(parts)]


def rows_of(placement: Shard | Rows, rows: int, parts: int) -> list[int]:
    """How many of ``rows`` along the placement's dimension each of ``parts`` devices owns."""
    return [*placement.rows] if isinstance(placement, Rows) else rows_of_parts(rows, parts)


def moved(placement: Shard | Rows, dim: int) -> Shard | Rows:
    """The same division along another dimension."""
    return Rows(dim, placement.rows) if isinstance(placement, Rows) else Shard(dim)


def part_shapes(shape: Sequence[int], placement: Division, parts: int) -> list[torch.Size]:
    """The shape of each device's part of a tensor of this shape. The first one owns a 0-dim tensor."""
    if isinstance(placement, Replicate):
        return [torch.Size(shape)] * parts
    if not shape:
        return [torch.Size(()), *[torch.Size((0,))] * (parts - 1)]
    dim = placement.dim
    return [torch.Size([*shape[:dim], rows, *shape[dim + 1 :]]) for rows in rows_of(placement, shape[dim], parts)]


# ---- owners ----------------------------------------------------------------------------------------------------------

META = "meta"


class Owners(tuple[torch.device, ...]):
    """The owners on this machine, and the machines whose owners have the other parts.

    Owners on one machine need not be of this class: they are any tuple, and equal to `Owners` without ``over``.

    Args:
        devices: of this machine, in the order of the parts. Other machines have as many.
        over: the machines. Default: none but this one.
    """

    over: Machines | None

    def __new__(cls, devices: Iterable[torch.device], over: Machines | None = None) -> Owners:
        """The class's own arguments: those of a tuple are fixed here."""
        made = super().__new__(cls, devices)
        made.over = over
        return made

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and self.over == getattr(other, "over", None)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self) if self.over is None else hash((*self, self.over))

    def __repr__(self) -> str:
        devices = [*map(str, self)]
        return f"Owners({devices})" if self.over is None else f"Owners({devices} of {self.over.describe()})"

    def __reduce__(self) -> tuple[object, ...]:
        if self.over is not None:
            raise TypeError(f"{self!r} cannot be pickled: a process group belongs to its process")
        return Owners, (tuple(self),)

    def __deepcopy__(self, memo: object) -> Owners:
        return self


def over_of(devices: Sequence[object]) -> Machines | None:
    """The machines of these owners; none for those of one machine."""
    return devices.over if isinstance(devices, Owners) else None


def parts_on_all(owners: int, over: Machines | None) -> int:
    """How many parts there are on all machines, with as many owners on each."""
    return owners if over is None else owners * over.size


def on_this_machine(of_parts: Sequence[T], over: Machines | None) -> Sequence[T]:
    """Of a list for the parts on all machines what belongs to those on this one."""
    return of_parts if over is None else of_parts[over.rank :: over.size]


def destinations(owners: Sequence[torch.device], device: torch.device) -> tuple[torch.device, ...]:
    """Where the parts go that are to be on ``device``: all of them there, if it is the CPU or meta.

    Each goes to its owner if ``device`` is the first of the owners, or the current device of a type that owners have;
    ``"cuda"`` means the current device, as everywhere in torch.

    Raises:
        ValueError: another device, or owners that the machine lacks.
    """
    if device.type == META:
        return (device,) * len(owners)
    is_current = device.index is None or device == current_device(device)
    is_of_owners = device.type != CPU.type and device.type in {owner.type for owner in owners}
    if device == owners[0] or (is_of_owners and is_current):
        return tuple(resolve_each(owners))
    if device.type == CPU.type:
        return (CPU,) * len(owners)
    raise ValueError(
        f"a sharded tensor with the owners {', '.join(map(str, owners))} cannot be moved to {str(device)!r}: move it "
        f"to {str(owners[0])!r}, which means its owners, or to 'cpu'; full_tensor({str(device)!r}) is the whole there"
    )


def after_loading(owners: Sequence[torch.device], places: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """The owners of a tensor that has been loaded, with its parts in ``places``.

    With ``map_location`` parts may be loaded to other devices than those they were saved from. On the CPU and on meta,
    and if all of them are on one device, the owners are those that were saved. Else they are the places, which the
    caller has chosen one by one. So they are if the machine lacks a saved owner, unless the parts are on CPU or meta.
    """
    if all(place.type in (CPU.type, META) for place in places):
        return tuple(owners)
    if len({*places}) == 1 and places[0].type == owners[0].type:
        with suppress(ValueError):
            return tuple(resolve_each(owners))
    return tuple(places)
