"""Where the parts of a tensor go when a caller names one device for the whole.

A sharded tensor keeps its owners when its parts are elsewhere: on the CPU after ``.cpu()`` or ``map_location="cpu"``,
or on meta. A device of the owners' type means the owners then. This file knows devices only. The rest of ``sharded``
calls it, nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel.devices import CPU, current_device, resolve_each

__all__ = ["after_loading", "destinations"]

META = "meta"


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
