"""Collectives across machines: what the replica that comes last does with the tensors of its machine's replicas.

They have been brought to its first device, and the results go from there to all slots (``collectives``). Here they are
exchanged with those of other machines, by ``machines.peer_rounds``, with operators that autograd knows, so all of it
can be differentiated. Sums add in the order of ranks, so the same bits come out on every machine and in every run.

Machines first say what the others cannot know: whether their tensors are in a graph, and sizes that may differ. Tensors
of one dtype travel as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

__all__ = ["broadcast", "gathered", "near_equal", "scattered", "sent", "summed"]

_SMALL = 64 * 1024
"""Bytes up to which each machine gets the tensors of all others and adds them up. For larger ones each machine adds up
a part, and then gets the parts of the others."""


def summed(machines: Any, text: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums over machines of tensors that have the same shapes on all of them."""
    in_graph = _in_graph(machines, text, tensors)

    def added(name: str, flat: Tensor) -> Tensor:
        return _sum_of_flats(machines, name, flat, in_graph and _can(flat.dtype))

    return _by_dtype(text, tensors, added)


def _sum_of_flats(machines: Any, text: str, flat: Tensor, in_graph: bool) -> Tensor:
    size, rank, numel = machines.size, machines.rank, flat.numel()
    if size <= 2 or numel * flat.element_size() <= _SMALL:
        # One node for all copies of it, so that its gradients are added in the order of ranks.
        found = machines.exchange(text, flat.expand(size, numel).unbind(), [numel] * size, in_graph)
        return _sum(found)
    sizes = near_equal(numel, size)
    part = _sum(machines.exchange(f"{text}, parts", flat.split(sizes), [sizes[rank]] * size, in_graph))
    return torch.cat(machines.exchange(f"{text}, sums", part.expand(size, part.numel()).unbind(), sizes, in_graph))


def _sum(of_machines: Sequence[Tensor]) -> Tensor:
    return torch.stack([*of_machines]).sum(0, dtype=of_machines[0].dtype)


def gathered(
    machines: Any, text: str, tensors: Sequence[Tensor], dim: int, note: Any = None
) -> tuple[list[Tensor], list[Any]]:
    """The tensors of all machines, concatenated along ``dim``, where their sizes may differ; and all notes."""
    said = machines.say(text, (_needs_grad(tensors), [tensor.shape[dim] for tensor in tensors], note))
    in_graph = any(needs for needs, _, _ in said)
    results: list[Tensor] = [*tensors]
    for dtype, members in _members(tensors):
        shapes = [[_resized(tensors[i], dim, sizes[i]) for i in members] for _, sizes, _ in said]
        numels = [[shape.numel() for shape in of_machine] for of_machine in shapes]
        flat = torch.cat([tensors[i].reshape(-1) for i in members])
        pieces = flat.expand(machines.size, flat.numel()).unbind()
        found = machines.exchange(f"{text} {dtype}", pieces, [sum(own) for own in numels], in_graph and _can(dtype))
        parts = [piece.split(own) for piece, own in zip(found, numels, strict=True)]
        for at, i in enumerate(members):
            of_all = [part[at].view(own[at]) for part, own in zip(parts, shapes, strict=True)]
            results[i] = torch.cat(of_all, dim)
    return results, [note for _, _, note in said]


def _resized(tensor: Tensor, dim: int, size: int) -> torch.Size:
    shape = [*tensor.shape]
    shape[dim] = size
    return torch.Size(shape)


def scattered(machines: Any, text: str, tensors: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """This machine's rows of the sums over machines. ``rows``: of each tensor, how many each machine gets."""
    in_graph = _in_graph(machines, text, tensors)
    results: list[Tensor] = [*tensors]
    for dtype, members in _members(tensors):
        chunks = [tensors[i].split([*rows[i]]) for i in members]
        pieces = [torch.cat([of[rank].reshape(-1) for of in chunks]) for rank in range(machines.size)]
        own = pieces[machines.rank].numel()
        total = _sum(machines.exchange(f"{text} {dtype}", pieces, [own] * machines.size, in_graph and _can(dtype)))
        mine = [of[machines.rank] for of in chunks]
        for i, like, flat in zip(members, mine, total.split([each.numel() for each in mine]), strict=True):
            results[i] = flat.view(like.shape)
    return results


def broadcast(machines: Any, text: str, tensors: Sequence[Tensor], source: int) -> list[Tensor]:
    """The tensors of the machine ``source``, which have the same shapes on all."""
    in_graph = _in_graph(machines, text, tensors)

    def from_source(name: str, flat: Tensor) -> Tensor:
        is_source, size, numel = machines.rank == source, machines.size, flat.numel()
        # An empty part of the own tensors keeps them in the graph, so that a backward reaches the same on all machines.
        pieces = flat.expand(size, numel).unbind() if is_source else [flat[:0]] * size
        sizes = [numel if rank == source else 0 for rank in range(size)]
        found: list[Tensor] = machines.exchange(name, pieces, sizes, in_graph and _can(flat.dtype))
        return found[source]

    return _by_dtype(text, tensors, from_source)


def sent(machines: Any, text: str, of_slots: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> list[list[Tensor]]:
    """For each replica of this machine what all replicas have for it, in their order.

    Args:
        machines: the call.
        text: of the collective.
        of_slots: for each replica of this machine a tensor for each replica of all machines, all of one dtype and on
            one device.
        counts: how many replicas each machine has.
    """
    shapes = [[tuple(tensor.shape) for tensor in own] for own in of_slots]
    said = machines.say(text, (_needs_grad([*chain.from_iterable(of_slots)]), shapes))
    in_graph = any(needs for needs, _ in said) and _can(of_slots[0][0].dtype)
    firsts = [0, *accumulate(counts)]
    targets = [range(firsts[rank], firsts[rank + 1]) for rank in range(machines.size)]
    pieces = [torch.cat([own[to].reshape(-1) for to in of for own in of_slots]) for of in targets]
    mine = targets[machines.rank]
    # From each machine: for each replica here, what each replica there has for it.
    found_shapes = [[torch.Size(own[to]) for to in mine for own in shapes] for _, shapes in said]
    sizes = [[shape.numel() for shape in of_machine] for of_machine in found_shapes]
    found = machines.exchange(text, pieces, [sum(of_machine) for of_machine in sizes], in_graph)
    results: list[list[Tensor]] = [[] for _ in mine]
    for flat, of_machine, own_sizes in zip(found, found_shapes, sizes, strict=True):
        parts = [part.view(shape) for part, shape in zip(flat.split(own_sizes), of_machine, strict=True)]
        sources = len(parts) // len(mine)
        for at, own in enumerate(results):
            own += parts[at * sources : (at + 1) * sources]
    return results


def near_equal(size: int, count: int) -> list[int]:
    """``count`` sizes that add up to ``size``, as ``torch.tensor_split`` makes them."""
    return [size // count + (at < size % count) for at in range(count)]


def _by_dtype(text: str, tensors: Sequence[Tensor], of_flat: Callable[[str, Tensor], Tensor]) -> list[Tensor]:
    """Tensors of the same shapes, made of the flat tensors of each dtype."""
    results: list[Tensor] = [*tensors]
    for dtype, members in _members(tensors):
        own = [tensors[i] for i in members]
        flat = of_flat(f"{text} {dtype}", torch.cat([each.reshape(-1) for each in own]))
        for i, like, part in zip(members, own, flat.split([each.numel() for each in own]), strict=True):
            results[i] = part.view(like.shape)
    return results


def _members(tensors: Sequence[Tensor]) -> Iterator[tuple[torch.dtype, list[int]]]:
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        yield dtype, [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]


def _in_graph(machines: Any, text: str, tensors: Sequence[Tensor]) -> bool:
    """True if a machine brings tensors that are in a graph. Without gradients nobody has to ask."""
    return torch.is_grad_enabled() and any(machines.say(text, _needs_grad(tensors)))


def _needs_grad(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _can(dtype: torch.dtype) -> bool:
    """True if tensors of the dtype have gradients."""
    return dtype.is_floating_point or dtype.is_complex
