"""`SampleCopies` scatters lists with one entry for each sample (`dataparallel.samples`). `joined_samples` joins them.

Tensors inside are moved whole. Tensors that go to the same slots travel by one ``Broadcast``, so tensors of one dtype
share a flat buffer, and one node of the graph has all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dataparallel.autograd.functions import Broadcast, Collect
from dataparallel.batches.structures import PerReplica, batch_of, leaves, tensors_in, with_leaves
from dataparallel.comm.checks import why_not_movable
from dataparallel.samples import Samples


def check_entries(marked: Samples[Any], path: str) -> None:
    for place, leaf in leaves(list(marked), path):
        if isinstance(leaf, PerReplica):
            raise ValueError(
                f"{place} is a PerReplica inside dataparallel.samples(...), where each entry is for one sample: pass "
                "it beside the samples"
            )
        if isinstance(leaf, Tensor):
            problem = why_not_movable(leaf)
            if problem:
                raise ValueError(f"{place} {problem}")


class SampleCopies:
    """The lists of samples of one scatter, with copies of their tensors.

    A tensor that several entries or lists hold has one copy on each slot that gets it, and its gradients are added in
    slot order.
    """

    def __init__(self, found: Iterable[Samples[Any]], slots: Sequence[torch.device], sizes: Sequence[int]) -> None:
        self._slots = slots
        cuts = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        self._parts = {id(marked): (marked, [Samples(marked[cut]) for cut in cuts]) for marked in found}
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for tensor, holding in _holding(parts for _, parts in self._parts.values()):
            groups.setdefault(holding, []).append(tensor)
        self._copies: list[dict[int, Tensor]] = [{} for _ in slots]
        for group, tensors in groups.items():
            copies = _on_slots(tensors, [slots[slot] for slot in group])
            for slot, slot_copies in zip(group, copies, strict=True):
                self._copies[slot].update(zip(map(id, tensors), slot_copies, strict=True))

    def of(self, marked: Samples[Any]) -> list[Samples[Any]]:
        _, parts = self._parts[id(marked)]
        return [
            _rebuilt(part, copies, slot) for part, copies, slot in zip(parts, self._copies, self._slots, strict=True)
        ]


def joined_samples(parts: Sequence[Samples[Any]], device: torch.device) -> Samples[Any]:
    """Joins the entries of all lists in order, with tensors on ``device``. One node of the graph has all tensors."""
    tensors = {id(tensor): tensor for part in parts for tensor in tensors_in(part)}
    if len(parts) > 1 or any(tensor.device != device for tensor in tensors.values()):
        tensors.update(zip(tensors, Collect.apply([device], *tensors.values()) if tensors else (), strict=True))
    return Samples(entry for part in parts for entry in _rebuilt(part, tensors, device))


def _holding(lists: Iterable[Sequence[Samples[Any]]]) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Returns each tensor inside chunks of lists once, with the numbers of the slots that get it, in order."""
    # The key is the id of a tensor. The entry holds this tensor, so that no other tensor gets the id.
    found: dict[int, tuple[Tensor, set[int]]] = {}
    for parts in lists:
        for slot, part in enumerate(parts):
            for tensor in tensors_in(part):
                found.setdefault(id(tensor), (tensor, set()))[1].add(slot)
    return [(tensor, tuple(sorted(holding))) for tensor, holding in found.values()]


def _on_slots(tensors: list[Tensor], slots: list[torch.device]) -> list[list[Tensor]]:
    """Returns the tensors of each slot. With a single slot, tensors that are there already are not copied."""
    moving = [tensor for tensor in tensors if [tensor.device] != slots]
    flat = iter(Broadcast.apply(slots, *moving) if moving else ())
    return [[next(flat) if [tensor.device] != slots else tensor for tensor in tensors] for _ in slots]


def _rebuilt(marked: Samples[Any], copy_of: dict[int, Tensor], device: torch.device) -> Samples[Any]:
    """Returns the list with copies in place of its tensors. ``copy_of`` has the copies by the tensors' ids."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copy_of[id(leaf)]
        if isinstance(leaf, Samples):
            return _rebuilt(leaf, copy_of, device)
        batch = batch_of(leaf)
        return leaf if batch is None else batch.to(leaf, device)

    return Samples(with_leaves(list(marked), moved))
