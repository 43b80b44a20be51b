"""Who owns the parts of a tensor: devices of this machine, and with `Owners` those of other machines too.

A tensor over M machines with N owners on each has ``N * M`` parts. Part ``j * M + m`` belongs to owner ``j`` of machine
``m``. A machine has its own parts only, and calls the others through an `Over`, which the room of the machines
implements. Operators that call it are collective: all machines run them, in one order.

A sharded tensor keeps its owners when its parts are elsewhere: on the CPU after ``.cpu()`` or ``map_location="cpu"``,
or on meta. A device of the owners' type means the owners then.

This file knows devices only: no tensors, no process groups. ``sharded``, ``units`` and ``composable`` call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dataparallel.devices import CPU, current_device, resolve_each

__all__ = ["Over", "Owners", "after_loading", "destinations", "over_of"]

META = "meta"


class Over(Protocol):
    """The machines over which a tensor is sharded. Two are equal, and have one hash, if they mean the same machines."""

    @property
    def size(self) -> int:
        """How many machines."""
        ...

    @property
    def rank(self) -> int:
        """The number of this one."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all machines, of one shape and dtype, as one tensor ``[size, *shape]`` on its device."""
        ...

    def describe(self) -> str:
        """For messages: "machine 0 of 2"."""
        ...


class Owners(tuple[torch.device, ...]):
    """The owners on this machine, and the machines whose owners have the other parts.

    Owners on one machine need not be of this class: they are any tuple, and equal to `Owners` without ``over``.

    Args:
        devices: of this machine, in the order of the parts. Other machines have as many.
        over: the machines. Default: none but this one.
    """

    over: Over | None

    def __new__(cls, devices: Iterable[torch.device], over: Over | None = None) -> Owners:
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


def over_of(devices: Sequence[object]) -> Over | None:
    """The machines of these owners; none for those of one machine."""
    return devices.over if isinstance(devices, Owners) else None


def destinations(owners: Sequence[torch.device], device: torch.device) -> tuple[torch.device, ...]:
    """Where the parts go that are to be on ``device``.

    That is each on its owner if ``device`` is the first of the owners, or the current device of a type that owners
    have; ``"cuda"`` means the current device, as everywhere in torch. On the CPU and on meta all parts are on one
    device.

    Raises:
        ValueError: another device, or owners that the machine lacks.
    """
    if device.type == META:
        return (device,) * len(owners)
    is_of_owners = device.type in {owner.type for owner in owners}
    if device == owners[0] or (is_of_owners and device.type != CPU.type and _is_current(device)):
        return tuple(resolve_each(owners))
    if device.type == CPU.type:
        return (CPU,) * len(owners)
    raise ValueError(
        f"a sharded tensor with the owners {', '.join(map(str, owners))} cannot be moved to {str(device)!r}: move it "
        f"to {str(owners[0])!r}, which means its owners, or to 'cpu'; full_tensor({str(device)!r}) is the whole there"
    )


def _is_current(device: torch.device) -> bool:
    return device.index is None or device == current_device(device)


def after_loading(owners: Sequence[torch.device], places: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """The owners of a tensor that has been loaded, with its parts in ``places``.

    With ``map_location`` parts may be loaded to other devices than those they were saved from. On the CPU and on meta,
    and if all of them are on one device, the owners are those that were saved. Else they are the places, which the
    caller has chosen one by one. Owners that the machine lacks are replaced by the places too, unless those are the CPU
    or meta.
    """
    if all(place.type in (CPU.type, META) for place in places):
        return tuple(owners)
    if len({*places}) == 1 and places[0].type == owners[0].type:
        try:
            return tuple(resolve_each(owners))
        except ValueError:
            return tuple(places)
    return tuple(places)
