"""Collectives across machines: what the replica that comes last does with the tensors of its machine's replicas.

Autograd knows all operators here. Sums add in the order of ranks, so every machine and every run gets the same bits.
Machines first say what the others cannot know: if their tensors are in a graph, and sizes that may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

_SMALL = 64 * 1024
"""Bytes up to which each machine gets the tensors of all others and adds them up. For larger ones each machine adds up
a part, and then gets the parts of the others."""


def summed(machines: Any, text: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums over machines of tensors that have the same shapes on all of them."""
    in_graph = _in_graph(machines, text, tensors)
    flats, size = _flats(tensors), machines.size
    if size <= 2 or sum(flat.numel() * flat.element_size() for flat in flats) <= _SMALL:
        # One node for all copies of a flat, so that its gradients are added in the order of ranks.
        found = machines.exchange(text, *_to_each(size, flats), in_graph)
        return _unflat(tensors, [*map(_sum, found)])
    sizes = [near_equal(flat.numel(), size) for flat in flats]
    split = [flat.split(each) for flat, each in zip(flats, sizes, strict=True)]
    mine = [[each[machines.rank]] * size for each in sizes]
    parts = [*map(_sum, machines.exchange(f"{text}, parts", split, mine, in_graph))]
    copies, _ = _to_each(size, parts)
    return _unflat(tensors, [*map(torch.cat, machines.exchange(f"{text}, sums", copies, sizes, in_graph))])


def _sum(of_machines: Sequence[Tensor]) -> Tensor:
    return torch.stack([*of_machines]).sum(0, dtype=of_machines[0].dtype)


def gathered(
    machines: Any, text: str, tensors: Sequence[Tensor], dim: int, note: Any = None
) -> tuple[list[Tensor], list[Any]]:
    """The tensors of all machines, concatenated along ``dim``, where their sizes may differ; and all notes."""
    said = machines.all_gather_object(text, (_needs_grad(tensors), [tensor.shape[dim] for tensor in tensors], note))
    in_graph = any(needs for needs, _, _ in said)
    members, results = _members(tensors), [*tensors]
    shapes = [[[_resized(tensors[i], dim, sizes[i]) for i in own] for _, sizes, _ in said] for own in members]
    numels = [[[shape.numel() for shape in of_machine] for of_machine in of_dtype] for of_dtype in shapes]
    copies, _ = _to_each(machines.size, _flats(tensors))
    found = machines.exchange(text, copies, [[*map(sum, of_dtype)] for of_dtype in numels], in_graph)
    for own, of_dtype, sizes, pieces in zip(members, shapes, numels, found, strict=True):
        parts = [piece.split(of_machine) for piece, of_machine in zip(pieces, sizes, strict=True)]
        for at, i in enumerate(own):
            results[i] = torch.cat([part[at].view(each[at]) for part, each in zip(parts, of_dtype, strict=True)], dim)
    return results, [note for _, _, note in said]


def _resized(tensor: Tensor, dim: int, size: int) -> torch.Size:
    shape = [*tensor.shape]
    shape[dim] = size
    return torch.Size(shape)


def scattered(machines: Any, text: str, tensors: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """This machine's rows of the sums over machines. ``rows``: of each tensor, how many each machine gets."""
    in_graph = _in_graph(machines, text, tensors)
    chunks = [tensor.split([*sizes]) for tensor, sizes in zip(tensors, rows, strict=True)]
    of_machines = [_flats([of[rank] for of in chunks]) for rank in range(machines.size)]
    pieces = [*zip(*of_machines, strict=True)]  # of each dtype
    mine = [[own.numel()] * machines.size for own in of_machines[machines.rank]]
    found = machines.exchange(text, pieces, mine, in_graph)
    return _unflat([of[machines.rank] for of in chunks], [*map(_sum, found)])


def broadcast(machines: Any, text: str, tensors: Sequence[Tensor], source: int) -> list[Tensor]:
    """The tensors of the machine ``source``, which have the same shapes on all."""
    in_graph = _in_graph(machines, text, tensors)
    flats, size = _flats(tensors), machines.size
    # An empty part of the own tensors keeps them in the graph, so that a backward reaches the same on all machines.
    pieces = [
        flat.expand(size, flat.numel()).unbind() if machines.rank == source else [flat[:0]] * size for flat in flats
    ]
    sizes = [[flat.numel() if rank == source else 0 for rank in range(size)] for flat in flats]
    return _unflat(tensors, [found[source] for found in machines.exchange(text, pieces, sizes, in_graph)])


def sent(machines: Any, text: str, of_slots: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> list[list[Tensor]]:
    """For each replica of this machine what all replicas have for it, in their order.

    ``of_slots``: for each replica of this machine a tensor for each replica of all machines, all of one dtype and on
    one device. ``counts``: how many replicas each machine has.
    """
    shapes = [[tuple(tensor.shape) for tensor in own] for own in of_slots]
    said = machines.all_gather_object(text, (_needs_grad([*chain.from_iterable(of_slots)]), shapes))
    in_graph = any(needs for needs, _ in said)
    firsts = [0, *accumulate(counts)]
    targets = [range(firsts[rank], firsts[rank + 1]) for rank in range(machines.size)]
    pieces = [torch.cat([own[to].reshape(-1) for to in of for own in of_slots]) for of in targets]
    mine = targets[machines.rank]
    # From each machine: for each replica here, what each replica there has for it.
    found_shapes = [[torch.Size(own[to]) for to in mine for own in shapes] for _, shapes in said]
    sizes = [[shape.numel() for shape in of_machine] for of_machine in found_shapes]
    (found,) = machines.exchange(text, [pieces], [[sum(of_machine) for of_machine in sizes]], in_graph)
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


def _members(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of the tensors of each dtype."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[i for i, tensor in enumerate(tensors) if tensor.dtype == dtype] for dtype in dtypes]


def _flats(tensors: Sequence[Tensor]) -> list[Tensor]:
    """For each dtype the tensors one after the other."""
    return [torch.cat([tensors[i].reshape(-1) for i in own]) for own in _members(tensors)]


def _unflat(like: Sequence[Tensor], flats: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of these shapes."""
    results = [*like]
    for own, flat in zip(_members(like), flats, strict=True):
        for i, part in zip(own, flat.split([like[i].numel() for i in own]), strict=True):
            results[i] = part.view(like[i].shape)
    return results


def _to_each(size: int, flats: Sequence[Tensor]) -> tuple[list[Sequence[Tensor]], list[list[int]]]:
    """Every flat tensor for each of ``size`` machines, and as many elements from each."""
    return [flat.expand(size, flat.numel()).unbind() for flat in flats], [[flat.numel()] * size for flat in flats]


def _in_graph(machines: Any, text: str, tensors: Sequence[Tensor]) -> bool:
    """True if a machine brings tensors that are in a graph. Without gradients nobody has to ask."""
    return torch.is_grad_enabled() and any(machines.all_gather_object(text, _needs_grad(tensors)))


def _needs_grad(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
