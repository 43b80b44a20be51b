"""One node of the graph for several tensors: the backward behind it begins when all their gradients are there.

Where each output of a replica is gathered by a node of its own, gradients come to a slot one after the other, at times
that differ from run to run. The engine adds gradients of a tensor in the order in which they come, so their sums would
not have the same bits in every run.

A backward that reaches one output of the node reaches all of them: what made the others gets ``None``, and frees what
it has saved. On one device that happens only to what the outputs share. So ``joined`` makes one node only for outputs
that share something with saved tensors (`sharing`). An output is left out if a Python function of the user's lies
between it and what is shared: that would be called with zeros in place of ``None``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from dataparallel import _torch
from dataparallel.autograd.node import Node
from dataparallel.comm.buckets import alias

__all__ = ["OneNode", "sharing"]


class OneNode(Node):
    """``OneNode.apply(*tensors)``: other tensor objects on the same memory, with the same version counters."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(alias(tensor, 0) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def sharing(makers: Sequence[Any]) -> list[list[int]]:
    """Positions of those nodes that share one with saved tensors further back, in groups of at least two.

    The search goes back in the order of the engine, and ends when all are one group. A node is left out if a user's
    Python function behind it is not shared by its whole group.
    """
    of = [*range(len(makers))]  # the group of each position
    reached: dict[Any, set[int]] = {}
    written: list[Any] = []  # nodes of users' Python functions
    queue: list[tuple[int, int, Any]] = []  # by sequence number, highest first

    def reach(node: Any, positions: set[int]) -> None:
        before = reached.get(node, set())
        if not positions <= before:
            reached[node] = before | positions
            heapq.heappush(queue, (-_torch.sequence_nr(node), id(node), node))

    for position, maker in enumerate(makers):
        reach(maker, {position})
    while queue and len({*of}) > 1:
        *_, node = heapq.heappop(queue)
        positions, kind = reached[node], node.__class__
        if _is_users(kind):
            written.append(node)
        if len(positions) > 1 and _saves_tensors(kind):
            groups = {of[position] for position in positions}
            of = [min(groups) if group in groups else group for group in of]
        for following, _ in node.next_functions:
            if following is not None and following.next_functions:  # all else is `AccumulateGrad`
                reach(following, positions)
    found = [[position for position, group in enumerate(of) if group == first] for first in dict.fromkeys(of)]
    users = [reached[node] for node in written]  # the positions in front of each
    kept: list[list[int]] = []
    for group in found:
        partly = [positions for positions in users if not positions.issuperset(group)]
        kept.append([position for position in group if not any(position in positions for positions in partly)])
    return [group for group in kept if len(group) > 1]


@cache
def _saves_tensors(kind: Any) -> bool:
    """True for nodes that may save tensors: those of torch, and of other code that is written in Python."""
    return _is_users(kind) or (not _is_ours(kind) and any(name.startswith("_raw_saved_") for name in dir(kind)))


def _is_ours(kind: Any) -> bool:
    return issubclass(getattr(kind, "_forward_cls", object), Node)


def _is_users(kind: Any) -> bool:
    return issubclass(kind, BackwardCFunction) and not _is_ours(kind)
