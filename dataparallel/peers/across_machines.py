"""Collectives across machines: `summed`, `gathered`, `scattered` and `broadcast`, over a `PeerCall`.

The last replica to arrive on a machine calls them with the tensors of all its replicas. They are differentiable. Sums
add in rank order, so every machine and every run gets the same bits. Machines first exchange whether their tensors are
in a graph, and sizes that may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel.comm.checks import tensor_split_sizes

_SMALL = 64 * 1024
"""Bytes up to which each machine receives all tensors and adds them. Larger sums are reduce-scatter and all-gather."""


def summed(peer_call: Any, text: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums over machines of tensors that have the same shapes on all machines."""
    in_graph = _in_graph(peer_call, text, tensors)
    flats, size = _flatten(tensors), peer_call.size
    if size <= 2 or sum(flat.numel() * flat.element_size() for flat in flats) <= _SMALL:
        # All copies of a flat tensor pass one node, so that its gradients are added in rank order.
        return _unflatten(tensors, [*map(_sum, peer_call.exchange(text, _copies_for_all(size, flats), in_graph))])
    sizes = [tensor_split_sizes(flat.numel(), size) for flat in flats]
    split = [flat.split(each) for flat, each in zip(flats, sizes, strict=True)]
    own_sizes = [[each[peer_call.rank]] * size for each in sizes]
    parts = [*map(_sum, peer_call.exchange(f"{text}, parts", split, in_graph, own_sizes))]
    received = peer_call.exchange(f"{text}, sums", _copies_for_all(size, parts), in_graph, sizes)
    return _unflatten(tensors, [*map(torch.cat, received)])


def _sum(of_machines: Sequence[Tensor]) -> Tensor:
    return torch.stack([*of_machines]).sum(0, dtype=of_machines[0].dtype)


def gathered(
    peer_call: Any, text: str, tensors: Sequence[Tensor], dim: int, note: Any = None
) -> tuple[list[Tensor], list[Any]]:
    """The tensors of all machines, concatenated along ``dim``, in which their sizes may differ; and their notes."""
    own = (_needs_grad(tensors), [tensor.shape[dim] for tensor in tensors], note)
    of_machines = peer_call.all_gather_object(text, own)
    in_graph = any(needs_grad for needs_grad, _, _ in of_machines)
    groups, results = _by_dtype(tensors), [*tensors]
    # For each dtype and machine the shape and the number of elements of each tensor.
    shapes = [[[_resized(tensors[i], dim, sizes[i]) for i in group] for _, sizes, _ in of_machines] for group in groups]
    numels = [[[shape.numel() for shape in of_machine] for of_machine in of_dtype] for of_dtype in shapes]
    copies = _copies_for_all(peer_call.size, _flatten(tensors))
    received = peer_call.exchange(text, copies, in_graph, [[*map(sum, of_dtype)] for of_dtype in numels])
    for group, of_dtype, sizes, flats in zip(groups, shapes, numels, received, strict=True):
        parts = [flat.split(of_machine) for flat, of_machine in zip(flats, sizes, strict=True)]
        for k, i in enumerate(group):
            results[i] = torch.cat([part[k].view(each[k]) for part, each in zip(parts, of_dtype, strict=True)], dim)
    return results, [note for _, _, note in of_machines]


def _resized(tensor: Tensor, dim: int, size: int) -> torch.Size:
    shape = [*tensor.shape]
    shape[dim] = size
    return torch.Size(shape)


def scattered(peer_call: Any, text: str, tensors: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """This machine's rows of the sums over machines. ``rows``: for each tensor how many rows each machine gets."""
    in_graph = _in_graph(peer_call, text, tensors)
    chunks = [tensor.split([*sizes]) for tensor, sizes in zip(tensors, rows, strict=True)]
    for_machines = [_flatten([of_tensor[rank] for of_tensor in chunks]) for rank in range(peer_call.size)]
    pieces = [*zip(*for_machines, strict=True)]  # for each dtype
    own_sizes = [[own.numel()] * peer_call.size for own in for_machines[peer_call.rank]]
    received = peer_call.exchange(text, pieces, in_graph, own_sizes)
    return _unflatten([of_tensor[peer_call.rank] for of_tensor in chunks], [*map(_sum, received)])


def broadcast(peer_call: Any, text: str, tensors: Sequence[Tensor], source: int) -> list[Tensor]:
    """The tensors of the machine ``source``. All machines pass tensors of the same shapes."""
    in_graph = _in_graph(peer_call, text, tensors)
    flats, size = _flatten(tensors), peer_call.size
    # Other machines send an empty slice, which keeps their tensors in the graph: a backward runs the node everywhere.
    pieces = [
        flat.expand(size, flat.numel()).unbind() if peer_call.rank == source else [flat[:0]] * size for flat in flats
    ]
    sizes = [[flat.numel() if rank == source else 0 for rank in range(size)] for flat in flats]
    received = peer_call.exchange(text, pieces, in_graph, sizes)
    return _unflatten(tensors, [of_dtype[source] for of_dtype in received])


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[i for i, tensor in enumerate(tensors) if tensor.dtype == dtype] for dtype in dtypes]


def _flatten(tensors: Sequence[Tensor]) -> list[Tensor]:
    """For each dtype a flat tensor that has its tensors one after the other."""
    return [torch.cat([tensors[i].reshape(-1) for i in group]) for group in _by_dtype(tensors)]


def _unflatten(like: Sequence[Tensor], flats: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes of ``like``, from the flat tensors that `_flatten` makes."""
    results = [*like]
    for group, flat in zip(_by_dtype(like), flats, strict=True):
        for i, part in zip(group, flat.split([like[i].numel() for i in group]), strict=True):
            results[i] = part.view(like[i].shape)
    return results


def _copies_for_all(size: int, flats: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Each flat tensor once for each of ``size`` machines."""
    return [flat.expand(size, flat.numel()).unbind() for flat in flats]


def _in_graph(peer_call: Any, text: str, tensors: Sequence[Tensor]) -> bool:
    """True if tensors of any machine are in a graph. Without gradients the machines exchange nothing."""
    return torch.is_grad_enabled() and any(peer_call.all_gather_object(text, _needs_grad(tensors)))


def _needs_grad(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
