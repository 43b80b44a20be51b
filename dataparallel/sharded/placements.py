"""`shard_shapes` says how a placement divides a tensor among its owners, and `Owners` names owners on several machines.

Placements are ``torch.distributed.tensor``'s own classes, so that they compare equal to users' placements. Owners are
devices of this machine, and with `Owners` those of other machines too: a tensor over M machines with N owners on each
has ``N * M`` shards, of which shard ``j * M + m`` belongs to owner ``j`` of machine ``m``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch.distributed.tensor import Replicate as Replicate
from torch.distributed.tensor import Shard as Shard

from dataparallel.devices import CPU, current_device, resolve_each

if TYPE_CHECKING:
    from dataparallel.machines.lanes import Machines

T = TypeVar("T")


Placement: TypeAlias = "Shard | Replicate"
"""How a tensor is divided."""


def check_placement(placement: object, shape: Sequence[int]) -> Placement:
    """Returns the placement, with a dimension that is not negative."""
    if isinstance(placement, Replicate):
        return placement
    # Exactly `Shard`: its subclasses divide in other ways.
    if type(placement) is not Shard:
        raise TypeError(f"a placement is Shard(dim) or Replicate() of torch.distributed.tensor; got {placement!r}")
    dim, dims = placement.dim, max(len(shape), 1)
    if not -dims <= dim < dims:
        raise ValueError(f"cannot place a tensor of shape {tuple(shape)} by {placement!r}: it has no such dimension")
    return Shard(dim % dims)


def rows_of_shards(rows: int, owners: int) -> list[int]:
    """How many of ``rows`` each of the owners has, cut as by ``torch.chunk``: the last ones have fewer, or none."""
    each = -(-rows // owners)
    return [max(0, min(each, rows - i * each)) for i in range(owners)]


def shard_shapes(shape: Sequence[int], placement: Placement, owners: int) -> list[torch.Size]:
    """The shape of each owner's shard of a tensor of this shape. The first owner has the element of a 0-dim tensor."""
    if isinstance(placement, Replicate):
        return [torch.Size(shape)] * owners
    if not shape:
        return [torch.Size(()), *[torch.Size((0,))] * (owners - 1)]
    dim = placement.dim
    return [torch.Size([*shape[:dim], rows, *shape[dim + 1 :]]) for rows in rows_of_shards(shape[dim], owners)]


# ---- owners ----------------------------------------------------------------------------------------------------------


class Owners(tuple[torch.device, ...]):
    """The owners on this machine, and with ``over`` the machines whose owners have the other shards, as many on each.

    If all owners are on one machine, any tuple of devices will do. It equals `Owners` without ``over``.
    """

    over: Machines | None

    def __new__(cls, devices: Iterable[torch.device], over: Machines | None = None) -> Owners:
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
    """The machines over which these owners are spread; ``None`` for owners on one machine."""
    return devices.over if isinstance(devices, Owners) else None


def shards_on_all_machines(owners: int, over: Machines | None) -> int:
    """How many shards all machines have together, with this many owners on each."""
    return owners if over is None else owners * over.size


def on_this_machine(of_shards: Sequence[T], over: Machines | None) -> Sequence[T]:
    """Selects the entries for the shards on this machine from a list with one entry for each shard on all machines."""
    return of_shards if over is None else of_shards[over.rank :: over.size]


def destinations(owners: Sequence[torch.device], device: torch.device) -> tuple[torch.device, ...]:
    """The devices to which ``tensor.to(device)`` moves the shards. If it is the CPU or meta, all of them go there.

    Each shard goes to its owner if ``device`` is the first owner, or the current device of a type that owners have;
    ``"cuda"`` means the current device, as everywhere in torch.
    """
    if device.type == "meta":
        return (device,) * len(owners)
    is_of_owners = device.type != CPU.type and device.type in {owner.type for owner in owners}
    # The current device is asked for last: the machine may lack the type of ``device``.
    if device == owners[0] or (is_of_owners and (device.index is None or device == current_device(device))):
        return tuple(resolve_each(owners))
    if device.type == CPU.type:
        return (CPU,) * len(owners)
    raise ValueError(
        f"a sharded tensor with the owners {', '.join(map(str, owners))} cannot be moved to {str(device)!r}: move it "
        f"to {str(owners[0])!r}, which means its owners, or to 'cpu'; full_tensor({str(device)!r}) is the whole there"
    )


def after_loading(owners: Sequence[torch.device], places: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """The owners of a tensor that was saved with ``owners`` and loaded with its shards on ``places``.

    ``map_location`` may load shards to other devices than they were saved from. The saved owners stay if all shards are
    on the CPU or meta. They also stay if all shards are on one device of the first owner's type and the machine has all
    saved owners. Otherwise the new owners are the places.
    """
    if all(place.type in ("cpu", "meta") for place in places):
        return tuple(owners)
    if len({*places}) == 1 and places[0].type == owners[0].type:
        with suppress(ValueError):
            return tuple(resolve_each(owners))
    return tuple(places)
