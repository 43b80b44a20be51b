"""Collectives across machines: `summed`, `gathered`, `scattered` and `broadcast`, over a `PeerCall`.

The last replica to arrive on a machine calls them with the tensors of all its replicas. They are differentiable. Sums
add in rank order, so every machine and every run gets the same bits.
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
    size = peer_call.size
    if size <= 2 or sum(tensor.nbytes for tensor in tensors) <= _SMALL:
        return _sums(peer_call.exchange(text, [tensors] * size)[0])
    rows = [tensor_split_sizes(tensor.numel(), size) for tensor in tensors]
    parts = scattered(peer_call, f"{text}, parts", [tensor.reshape(-1) for tensor in tensors], rows)
    sums, _ = gathered(peer_call, f"{text}, sums", parts, 0)
    return [total.view(tensor.shape) for total, tensor in zip(sums, tensors, strict=True)]


def gathered(
    peer_call: Any, text: str, tensors: Sequence[Tensor], dim: int, note: Any = None
) -> tuple[list[Tensor], list[Any]]:
    """The tensors of all machines, concatenated along ``dim``, in which their sizes may differ; and their notes."""
    received, notes = peer_call.exchange(text, [tensors] * peer_call.size, note)
    return [torch.cat(of_machines, dim) for of_machines in zip(*received, strict=True)], notes


def scattered(peer_call: Any, text: str, tensors: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """This machine's rows of the sums over machines. ``rows``: for each tensor how many rows each machine gets."""
    chunks = [tensor.split([*sizes]) for tensor, sizes in zip(tensors, rows, strict=True)]
    return _sums(peer_call.exchange(text, [[of_tensor[r] for of_tensor in chunks] for r in range(peer_call.size)])[0])


def broadcast(peer_call: Any, text: str, tensors: Sequence[Tensor], source: int) -> list[Tensor]:
    """The tensors of the machine ``source``. All machines pass tensors of the same shapes."""
    # Other machines send an empty slice, which keeps their tensors in the graph: a backward runs the node everywhere.
    sent = tensors if peer_call.rank == source else [tensor.reshape(-1)[:0] for tensor in tensors]
    found: list[Tensor] = peer_call.exchange(text, [sent] * peer_call.size)[0][source]
    return found


def _sums(received: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(of_machines).sum(0, dtype=of_machines[0].dtype) for of_machines in zip(*received, strict=True)]
