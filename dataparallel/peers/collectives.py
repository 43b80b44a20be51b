"""The collectives: what replicas say to each other inside ``forward``.

Each takes a tensor, or a nested structure of tensors, and returns the like. The results are in memory of their own. The
sums run in slot order, so the same bits come out in every run. All are differentiable, as often as you like: gradients
that come to the results of all replicas lead back to the tensors of all replicas. All replicas of a call have to call
the same collectives in the same order.

Outside of a parallel forward there is one replica, and a collective returns what one replica gets. ``joint`` brings the
tensors together; ``autograd.functions`` has the nodes that do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.functions import Broadcast, Gather, ReduceAddCoalesced, Scatter
from dataparallel.peers.identity import place_of_caller
from dataparallel.peers.joint import Together, joint
from dataparallel.peers.requests import Request, described

__all__ = ["Operation", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce_scatter"]

S = TypeVar("S")
Operation = Literal["sum", "mean", "max", "min", "prod"]


@_torch.not_traced
def all_reduce(tensor: S, op: Operation = "sum") -> S:
    """The sum over all replicas, or another combination of their tensors, for each replica.

    Args:
        tensor: a tensor, or a nested structure of tensors. Shapes and dtypes are the same in all replicas.
        op: ``"sum"``, ``"mean"`` (floating-point and complex tensors), ``"max"``, ``"min"``, ``"prod"``. For the last
            three each replica holds the tensors of all for a moment. The gradient of a maximum or minimum is shared
            equally by those that have it.

    Raises:
        TypeError: not a tensor; ``op="mean"`` of integers; ``op="sum"`` of bool.
        ValueError: another ``op``; a tensor on another device than the replica's.
        RuntimeError: replicas that do not wait for the same, or do not come; another replica has failed.
    """
    if op not in get_args(Operation):
        raise ValueError(f"op={op!r}: expected one of {', '.join(map(repr, get_args(Operation)))}")
    tensors, rebuilt = _flat("all_reduce", tensor)
    for one in tensors:
        if op == "mean" and not (one.is_floating_point() or one.is_complex()):
            raise TypeError(f'all_reduce: op="mean" of {one.dtype}: convert it to a floating-point dtype first')
        if op == "sum" and one.dtype == torch.bool:
            raise TypeError(
                'all_reduce: op="sum" of bool: convert it to an integer dtype first, or use "max" for "any"'
            )
    request = Request("all_reduce", repr(op), described(tensors))
    if op in ("sum", "mean"):
        sums = _exchange(request, tensors, _sums)
        place = place_of_caller()
        return rebuilt(sums if op == "sum" or place is None else [total / place.count for total in sums])
    stacks = _exchange(request, [one.unsqueeze(0) for one in tensors], _gathers(0))
    return rebuilt([_COMBINED[op](stack) for stack in stacks])


_COMBINED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "prod": lambda stack: stack.prod(0, dtype=stack.dtype),
}


@_torch.not_traced
def all_gather(tensor: S, dim: int = 0) -> S:
    """The tensors of all replicas in slot order, concatenated along ``dim``, for each replica.

    Args:
        tensor: a tensor, or a nested structure of tensors, with at least one dimension each. Sizes along ``dim`` may
            differ between replicas; everything else is the same.
        dim: the dimension; negative ones count from the end.

    Raises:
        IndexError: a tensor has no such dimension.
        TypeError, ValueError, RuntimeError: as `all_reduce`.
    """
    tensors, rebuilt = _flat("all_gather", tensor)
    for one in tensors:
        if not -one.dim() <= dim < one.dim():
            raise IndexError(f"all_gather: dim={dim} of a tensor of shape {[*one.shape]}; unsqueeze it first to stack")
    request = Request("all_gather", f"dim={dim}", described(tensors, dim))
    return rebuilt(_exchange(request, tensors, _gathers(dim)))


@_torch.not_traced
def broadcast(tensor: S, source: int) -> S:
    """The tensors of replica ``source``, for each replica. Gradients of all lead to those.

    Args:
        tensor: a tensor, or a nested structure of tensors. Shapes and dtypes are the same in all replicas.
        source: the number of a replica.

    Raises:
        IndexError: there is no such replica.
        TypeError, ValueError, RuntimeError: as `all_reduce`.
    """
    tensors, rebuilt = _flat("broadcast", tensor)
    place = place_of_caller()
    count = 1 if place is None else place.count
    if not 0 <= source < count:
        raise IndexError(f"broadcast: source={source}: the call has {count} replicas, from 0 on")

    def from_source(devices: Sequence[torch.device], of_slots: list[list[Tensor]], _: Any = None) -> list[list[Tensor]]:
        return _to_all(devices, of_slots[source], [source])

    return rebuilt(_exchange(Request("broadcast", f"source={source}", described(tensors)), tensors, from_source))


@_torch.not_traced
def reduce_scatter(tensor: S, sizes: Sequence[int] | None = None) -> S:
    """The sum over all replicas, of which each replica gets its chunk along the first dimension.

    Args:
        tensor: a tensor, or a nested structure of tensors. Shapes and dtypes are the same in all replicas.
        sizes: the size of each replica's chunk; default: near-equal ones, as ``torch.tensor_split`` makes them.

    Raises:
        ValueError: ``sizes`` do not fit the tensor or the number of replicas; as `all_reduce`.
        TypeError, RuntimeError: as `all_reduce`.
    """
    tensors, rebuilt = _flat("reduce_scatter", tensor)
    place = place_of_caller()
    count = 1 if place is None else place.count
    for one in tensors:
        if one.dim() == 0:
            raise ValueError("reduce_scatter: a tensor without a dimension has no chunks")
        if sizes is not None and (len(sizes) != count or sum(sizes) != one.shape[0] or min(sizes) < 0):
            raise ValueError(
                f"reduce_scatter: sizes={[*sizes]} for {count} replicas and a tensor of shape {[*one.shape]}: expected "
                "one size for each replica, which add up to the first dimension"
            )

    def chunks(devices: Sequence[torch.device], of_slots: list[list[Tensor]], _: Any = None) -> list[list[Tensor]]:
        totals = _total(devices, of_slots)
        whole = [sizes if sizes is not None else _near_equal(total.shape[0], count) for total in totals]
        pieces = [Scatter.apply(devices, own, 0, total) for own, total in zip(whole, totals, strict=True)]
        return [[piece[slot] for piece in pieces] for slot in range(count)]

    detail = "" if sizes is None else f"sizes={[*sizes]}"
    return rebuilt(_exchange(Request("reduce_scatter", detail, described(tensors)), tensors, chunks))


@_torch.not_traced
def all_to_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sends a tensor to each replica: the result has one from each replica, in slot order.

    Args:
        tensors: as many as there are replicas, of any shapes and one dtype. Entry ``j`` is for replica ``j``.

    Raises:
        ValueError: another number of tensors, several dtypes; as `all_reduce`.
        TypeError, RuntimeError: as `all_reduce`.
    """
    found, _ = _flat("all_to_all", [*tensors])
    place = place_of_caller()
    count = 1 if place is None else place.count
    if len(found) != count or len({one.dtype for one in found}) > 1:
        dtypes = ", ".join(sorted({str(one.dtype) for one in found}))
        raise ValueError(f"all_to_all: {len(found)} tensors of {dtypes}: expected {count} of one dtype, one a replica")

    def delivered(devices: Sequence[torch.device], of_slots: list[list[Tensor]], _: Any = None) -> list[list[Tensor]]:
        results = []
        for target, device in enumerate(devices):
            sent = [of_slot[target] for of_slot in of_slots]
            flat = Gather.apply(device, 0, *(one.reshape(-1) for one in sent))
            parts = flat.split([one.numel() for one in sent])
            results.append([part.reshape(one.shape).clone() for part, one in zip(parts, sent, strict=True)])
        return results

    shapes = tuple(replace(one, shape=()) for one in described(found[:1]))
    return _exchange(Request("all_to_all", "", shapes), found, delivered)


@_torch.not_traced
def barrier() -> None:
    """Waits until all replicas have come here. On accelerators it orders what is launched, and the host goes on.

    Raises:
        RuntimeError: as `all_reduce`.
    """
    _exchange(Request("barrier"), [], lambda devices, of_slots, notes: of_slots)


def _exchange(request: Request, tensors: list[Tensor], together: Together) -> list[Tensor]:
    place = place_of_caller()
    if place is None:
        return tensors
    return joint(place, replace(request, inference=torch.is_inference_mode_enabled()), tensors, together)


def _flat(name: str, structure: S) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The tensors of a nested structure, and what puts others in their places."""
    leaves, spec = _torch.pytree.tree_flatten(structure)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name} takes tensors and nested structures of tensors; got {type(leaf).__name__}")
    return leaves, lambda results: _torch.pytree.tree_unflatten(results, spec)


def _total(devices: Sequence[torch.device], of_slots: list[list[Tensor]]) -> list[Tensor]:
    """The sums, on the first device."""
    count = len(of_slots[0])
    return [*ReduceAddCoalesced.apply(devices[0], count, *chain.from_iterable(of_slots))] if count else []


def _sums(devices: Sequence[torch.device], of_slots: list[list[Tensor]], _: Any = None) -> list[list[Tensor]]:
    return _to_all(devices, _total(devices, of_slots))


def _gathers(dim: int) -> Together:
    def gathered(devices: Sequence[torch.device], of_slots: list[list[Tensor]], _: Any = None) -> list[list[Tensor]]:
        return _to_all(devices, [Gather.apply(devices[0], dim, *parts) for parts in zip(*of_slots, strict=True)])

    return gathered


def _to_all(
    devices: Sequence[torch.device], tensors: Sequence[Tensor], owners: Sequence[int] = ()
) -> list[list[Tensor]]:
    """A copy on each device. ``owners``: slots whose own tensors these are. No two results share memory."""
    if not tensors:
        return [[] for _ in devices]
    flat = Broadcast.apply(devices, *tensors)
    results = [[*flat[k : k + len(tensors)]] for k in range(0, len(flat), len(tensors))]
    taken = {devices[owner] for owner in owners}
    for slot, device in enumerate(devices):
        if device in taken:  # a broadcast copies once for each device
            results[slot] = [result.clone() for result in results[slot]]
        taken.add(device)
    return results


def _near_equal(size: int, count: int) -> list[int]:
    return [size // count + (slot < size % count) for slot in range(count)]
