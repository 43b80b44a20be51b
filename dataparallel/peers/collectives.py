"""Collectives that replicas call inside ``forward``: `all_reduce`, `all_gather`, `broadcast` and others.

Each takes a tensor or a nested structure of tensors, and returns the same kind, in memory of its own. Sums add in slot
order. All are differentiable any number of times. All replicas of a call call the same collectives in the same order.
With ``across_machines=True`` the replicas of all machines are numbered machine by machine, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.autograd.functions import Broadcast, Gather, ReduceAddCoalesced, Scatter
from dataparallel.comm.checks import tensor_split_sizes
from dataparallel.peers import across_machines as across
from dataparallel.peers.joint import JointSpan, Request, described, joint, span_of_caller

S = TypeVar("S")
Operation = Literal["sum", "mean", "max", "min", "prod"]


Devices: TypeAlias = Sequence[torch.device]
TensorsOfSlots: TypeAlias = list[list[Tensor]]
"""For each replica of this machine its tensors or its results."""

Collective: TypeAlias = Callable[[JointSpan, str, Devices, TensorsOfSlots], TensorsOfSlots]
"""As `joint.Combine`, with the span and the request's text, which is equal on all machines, in place of notes."""


@_torch.not_traced
def all_reduce(tensor: S, op: Operation = "sum", across_machines: bool = False) -> S:
    """The sum over all replicas, or another combination of their tensors, for each replica.

    Args:
        tensor: a tensor, or a nested structure of tensors. Shapes and dtypes are the same in all replicas.
        op: ``"sum"``, ``"mean"`` (floating-point and complex tensors), ``"max"``, ``"min"``, ``"prod"``. For the last
            three each replica holds the tensors of all for a moment. The gradient of a maximum or minimum is shared
            equally by those that have it.
        across_machines: over the replicas of all machines, if the form of the call has a process group.

    Raises:
        TypeError: not a tensor; ``op="mean"`` of integers; ``op="sum"`` of bool.
        ValueError: another ``op``; a tensor on another device than the replica's.
        RuntimeError: replicas that do not wait for the same, or do not come; another replica has failed. Across
            machines a `MachinesError` if machines do not come to the same, or one has failed or is gone.
    """
    op = checked("op", op, *get_args(Operation))
    tensors, rebuild = _leaves_of("all_reduce", tensor)
    for one in tensors:
        if op == "mean" and not (one.is_floating_point() or one.is_complex()):
            raise TypeError(f'all_reduce: op="mean" of {one.dtype}: convert it to a floating-point dtype first')
        if op == "sum" and one.dtype == torch.bool:
            raise TypeError(
                'all_reduce: op="sum" of bool: convert it to an integer dtype first, or use "max" for "any"'
            )
    request, span = Request("all_reduce", repr(op), described(tensors)), span_of_caller(across_machines)
    if op in ("sum", "mean"):
        sums = _exchange(span, request, tensors, _all_reduce)
        return rebuild(sums if op == "sum" or span is None else [total / span.count for total in sums])
    stacks = _exchange(span, request, [one.unsqueeze(0) for one in tensors], partial(_all_gather, dim=0))
    return rebuild([_COMBINED[op](stack) for stack in stacks])


_COMBINED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "prod": lambda stack: stack.prod(0, dtype=stack.dtype),
}


@_torch.not_traced
def all_gather(tensor: S, dim: int = 0, across_machines: bool = False) -> S:
    """The tensors of all replicas in slot order, concatenated along ``dim``, for each replica.

    Args:
        tensor: a tensor, or a nested structure of tensors, with at least one dimension each. Sizes along ``dim`` may
            differ between replicas; everything else is the same.
        dim: the dimension; negative ones count from the end.
        across_machines: as for `all_reduce`.

    Raises:
        IndexError: a tensor has no such dimension.
        TypeError, ValueError, RuntimeError: as `all_reduce`.
    """
    tensors, rebuild = _leaves_of("all_gather", tensor)
    for one in tensors:
        if not -one.dim() <= (dim := checked("dim", dim, int)) < one.dim():
            raise IndexError(f"all_gather: dim={dim} of a tensor of shape {[*one.shape]}; unsqueeze it first to stack")
    request = Request("all_gather", f"dim={dim}", described(tensors, dim))
    return rebuild(_exchange(span_of_caller(across_machines), request, tensors, partial(_all_gather, dim=dim)))


@_torch.not_traced
def broadcast(tensor: S, source: int, across_machines: bool = False) -> S:
    """The tensors of replica ``source``, for each replica. Gradients of all lead to those.

    Args:
        tensor: a tensor, or a nested structure of tensors. Shapes and dtypes are the same in all replicas.
        source: the number of a replica; across machines the one that ``index(across_machines=True)`` returns there.
        across_machines: as for `all_reduce`.

    Raises:
        IndexError: there is no such replica.
        TypeError, ValueError, RuntimeError: as `all_reduce`.
    """
    tensors, rebuild = _leaves_of("broadcast", tensor)
    span = span_of_caller(across_machines)
    count = 1 if span is None else span.count
    if not 0 <= (source := checked("source", source, int)) < count:
        raise IndexError(f"broadcast: source={source}: the call has {count} replicas, from 0 on")
    request = Request("broadcast", f"source={source}", described(tensors))
    return rebuild(_exchange(span, request, tensors, partial(_broadcast, source=source)))


def _broadcast(span: JointSpan, text: str, devices: Devices, of_slots: TensorsOfSlots, source: int) -> TensorsOfSlots:
    if span.peer_call is None:
        return _copies_for_all(devices, of_slots[source], source)
    rank = next(rank for rank in range(len(span.counts)) if source < sum(span.counts[: rank + 1]))
    sent = of_slots[0]
    if rank == span.rank and sent:
        sent = [*Broadcast.apply(devices[:1], *of_slots[source - sum(span.counts[:rank])])]
    return _copies_for_all(devices, across.broadcast(span.peer_call, text, sent, rank))


@_torch.not_traced
def reduce_scatter(tensor: S, sizes: Sequence[int] | None = None, across_machines: bool = False) -> S:
    """The sum over all replicas, of which each replica gets its chunk along the first dimension.

    Args:
        tensor: a tensor, or a nested structure of tensors. Shapes and dtypes are the same in all replicas.
        sizes: the size of each replica's chunk; default: near-equal ones, as ``torch.tensor_split`` makes them.
        across_machines: as for `all_reduce`.

    Raises:
        ValueError: ``sizes`` do not fit the tensor or the number of replicas; as `all_reduce`.
        TypeError, RuntimeError: as `all_reduce`.
    """
    tensors, rebuild = _leaves_of("reduce_scatter", tensor)
    span = span_of_caller(across_machines)
    count = 1 if span is None else span.count
    for one in tensors:
        if one.dim() == 0:
            raise ValueError("reduce_scatter: a tensor without a dimension has no chunks")
        if sizes is not None and (len(sizes) != count or sum(sizes) != one.shape[0] or min(sizes) < 0):
            raise ValueError(
                f"reduce_scatter: sizes={[*sizes]} for {count} replicas and a tensor of shape {[*one.shape]}: expected "
                "one size for each replica, which add up to the first dimension"
            )

    detail = "" if sizes is None else f"sizes={[*sizes]}"
    request = Request("reduce_scatter", detail, described(tensors))
    return rebuild(_exchange(span, request, tensors, partial(_reduce_scatter, sizes=sizes)))


def _reduce_scatter(
    span: JointSpan, text: str, devices: Devices, of_slots: TensorsOfSlots, sizes: Sequence[int] | None
) -> TensorsOfSlots:
    totals, counts, first = _sums_on_first(devices, of_slots), span.counts, sum(span.counts[: span.rank])
    of_all = [sizes if sizes is not None else tensor_split_sizes(each.shape[0], span.count) for each in totals]
    if span.peer_call is not None:
        rows = [[sum(own[sum(counts[:r]) : sum(counts[: r + 1])]) for r in range(len(counts))] for own in of_all]
        totals = across.scattered(span.peer_call, text, totals, rows)
    own_sizes = [own[first : first + len(devices)] for own in of_all]
    pieces = [Scatter.apply(devices, own, 0, total) for own, total in zip(own_sizes, totals, strict=True)]
    return [[piece[slot] for piece in pieces] for slot in range(len(devices))]


@_torch.not_traced
def barrier(across_machines: bool = False) -> None:
    """Waits until all replicas have come here. On accelerators it orders what is launched, and the host goes on.

    Args:
        across_machines: as for `all_reduce`. The hosts wait for each other.

    Raises:
        RuntimeError: as `all_reduce`.
    """

    def all_here(span: JointSpan, text: str, devices: Devices, of_slots: TensorsOfSlots) -> TensorsOfSlots:
        if span.peer_call is not None:
            span.peer_call.exchange(text, [[]] * len(span.counts))
        return of_slots

    _exchange(span_of_caller(across_machines), Request("barrier"), [], all_here)


def _exchange(span: JointSpan | None, request: Request, tensors: list[Tensor], collective: Collective) -> list[Tensor]:
    if span is None:
        return tensors
    is_across = span.peer_call is not None
    request = replace(request, across_machines=is_across, inference=torch.is_inference_mode_enabled())

    def combine(devices: Devices, of_slots: TensorsOfSlots, _: Any) -> TensorsOfSlots:
        return collective(span, str(request), devices, of_slots)

    return joint(span.place, request, tensors, combine)


def _leaves_of(name: str, structure: S) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The tensors of a nested structure, and a function that makes the same structure of other tensors."""
    leaves, spec = _torch.pytree.tree_flatten(structure)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name} takes tensors and nested structures of tensors; got {type(leaf).__name__}")
    return leaves, lambda results: _torch.pytree.tree_unflatten(results, spec)


def _sums_on_first(devices: Devices, of_slots: TensorsOfSlots) -> list[Tensor]:
    count = len(of_slots[0])
    return [*ReduceAddCoalesced.apply(devices[0], count, *chain.from_iterable(of_slots))] if count else []


def _all_reduce(span: JointSpan, text: str, devices: Devices, of_slots: TensorsOfSlots) -> TensorsOfSlots:
    totals = _sums_on_first(devices, of_slots)
    if span.peer_call is not None:
        totals = across.summed(span.peer_call, text, totals)
    return _copies_for_all(devices, totals)


def _all_gather(span: JointSpan, text: str, devices: Devices, of_slots: TensorsOfSlots, dim: int) -> TensorsOfSlots:
    found = [Gather.apply(devices[0], dim, *parts) for parts in zip(*of_slots, strict=True)]
    if span.peer_call is not None:
        found, _ = across.gathered(span.peer_call, text, found, dim)
    return _copies_for_all(devices, found)


def _copies_for_all(devices: Devices, tensors: Sequence[Tensor], owner: int | None = None) -> TensorsOfSlots:
    """Copies tensors for each slot. No two results share memory. ``owner``: the slot that has given the tensors."""
    if not tensors:
        return [[] for _ in devices]
    flat = Broadcast.apply(devices, *tensors)
    results = [[*flat[k : k + len(tensors)]] for k in range(0, len(flat), len(tensors))]
    taken = set() if owner is None else {devices[owner]}
    for slot, device in enumerate(devices):
        if device in taken:  # a broadcast copies once for each device
            results[slot] = [result.clone() for result in results[slot]]
        taken.add(device)
    return results
