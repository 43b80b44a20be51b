"""The base class of all autograd functions of the library, the order in which they run, and one node for many tensors.

Files that define autograd functions use it; ``torch.autograd.Function`` is for users.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from dataparallel import _torch
from dataparallel.comm.buckets import alias
from dataparallel.comm.streams.current import Event, current_streams, memory_of, streams_set
from dataparallel.devices import CPU


class Node(Function):
    """A ``torch.autograd.Function`` whose ``backward`` is never compiled by ``torch.compile``.

    The engine calls it in the thread of ``loss.backward()``, which may be part of a compiled function.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_torch.not_traced(cls.backward))  # type: ignore[method-assign]


def run_first(node: Any) -> None:
    """Makes the engine run the node as soon as its gradients have arrived, before other nodes that are ready."""
    _torch.set_sequence_nr(node, 2**62)


def run_last(node: Any) -> None:
    """Makes the engine's thread of the node's device run all other ready nodes first.

    So a backward that computes on the device runs to its end before the node: each of its nodes makes the next ready.
    """
    _torch.set_sequence_nr(node, 0)


def run_before_last(node: Any) -> None:
    """As `run_last`, but before the nodes for which that was called."""
    _torch.set_sequence_nr(node, 1)


def note_forward_streams(node: Any, inputs: Sequence[torch.device], outputs: Sequence[torch.device]) -> None:
    """Called in a forward: notes what `forward_streams_set` needs in the backward."""
    node.streams = current_streams([*inputs, *outputs])
    node.grad_input_devices = {*inputs} - {CPU}
    # The engine takes the stream of the first output on an accelerator for the node's.
    node.engine_device = next((device for device in outputs if device != CPU), None)


@contextmanager
def forward_streams_set(node: Any, grads: Sequence[Tensor | None]) -> Iterator[None]:
    """Makes the streams of the node's forward current again inside its backward, in order with other nodes.

    The engine orders the stream of the node's first output on an accelerator. So the streams of gradients on other
    devices wait for the engine's stream first, and at the end it waits for the streams of results. A gradient of
    another device may have been made on any stream there, so ``record_stream`` is called on its memory. For a node
    whose outputs are all on the CPU the engine orders each device's current stream.
    """
    current = current_streams(node.streams)
    engine_streams = {device: current[node.engine_device or device] for device in node.streams}
    unordered = {device: stream for device, stream in node.streams.items() if stream != engine_streams[device]}
    with streams_set(node.streams):
        unordered_grads = [grad for grad in grads if grad is not None and grad.device in unordered]
        for device in {grad.device for grad in unordered_grads}:
            Event(engine_streams[device]).make_wait(unordered[device])
        for memory in chain.from_iterable(map(memory_of, unordered_grads)):
            if memory.device in unordered:
                memory.record_stream(unordered[memory.device])
        yield
        for device in node.grad_input_devices & unordered.keys():
            Event(unordered[device]).make_wait(engine_streams[device])


class OneNode(Node):
    """``OneNode.apply(*tensors)``: other tensor objects on the same memory, with the same version counters.

    The backward behind it begins when all their gradients are there. With a node for each output of a replica they come
    at times that differ from run to run, and the engine adds gradients of a tensor in the order in which they come, so
    sums would not have the same bits in every run.

    A backward that reaches one output of the node reaches all: what made the others gets ``None``, and frees what it
    has saved. On one device that happens only to what outputs share, so ``joined`` joins only these: see `sharing`.
    """

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
    Python function behind it is not shared by its whole group: that would be called with zeros in place of ``None``.
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
