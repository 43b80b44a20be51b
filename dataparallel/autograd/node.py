"""`Node`: the base class of the library's autograd functions; their order and streams; `OneNode` for many tensors.

All autograd functions of the library derive from `Node`, never from ``torch.autograd.Function``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from dataparallel import _torch
from dataparallel.comm.kinds import alias
from dataparallel.comm.streams.current import Event, current_streams, memory_of, streams_set
from dataparallel.devices import CPU


class Node(Function):
    """A ``torch.autograd.Function`` whose ``backward`` is never compiled by ``torch.compile``.

    The engine calls ``backward`` in the thread of ``loss.backward()``, which may be part of a compiled function.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_torch.not_traced(cls.backward))  # type: ignore[method-assign]


def saved_instead(held: object) -> AbstractContextManager[Any]:
    """Returns a context around ``apply`` of a node that saves tensors. The graph keeps ``held`` in their place.

    That is until the node has run in a pass without ``retain_graph``, or until the graph is gone. The node may not ask
    for the tensors. Where saved-tensor hooks are disabled, nothing is kept.
    """
    if held is None or _torch.why_hooks_are_disabled() is not None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: held, lambda held: None)  # type: ignore[arg-type, return-value]


def run_first(node: Any) -> None:
    """Makes the engine run the node as soon as its gradients have arrived, before other nodes that are ready."""
    _torch.set_sequence_nr(node, 2**62)


def run_last(node: Any) -> None:
    """Makes the engine's thread of the node's device run all other ready nodes first.

    So a backward that computes on the device ends before this node runs: each node there makes the next one ready.
    """
    _torch.set_sequence_nr(node, 0)


def note_forward_streams(node: Any, inputs: Sequence[torch.device], outputs: Sequence[torch.device]) -> None:
    """Called in a forward: notes the streams for `forward_streams_set` in the backward."""
    node.streams = current_streams([*inputs, *outputs])
    node.grad_input_devices = {*inputs} - {CPU}
    # The engine runs the node on the stream of its first output on an accelerator.
    node.engine_device = next((device for device in outputs if device != CPU), None)


@contextmanager
def forward_streams_set(node: Any, grads: Sequence[Tensor | None]) -> Iterator[None]:
    """Makes the streams of the node's forward current again inside its backward, in order with other nodes.

    The engine orders only the stream of the node's first output on an accelerator. So the streams of gradients on other
    devices wait for the engine's stream first, and at the end the engine's stream waits for the streams of results. A
    gradient on another device may have been made on any stream there, so ``record_stream`` is called on its memory. For
    a node whose outputs are all on the CPU the engine orders each device's current stream.
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

    The backward behind the node begins when all gradients are there. With a node for each output of a replica gradients
    would arrive in an order that differs from run to run. The engine adds gradients of one tensor in the order of their
    arrival, so sums would not have the same bits in every run.

    A backward that reaches one output of the node reaches all: the nodes that made the other outputs get ``None``, and
    free their saved tensors. Without this node that happens only behind tensors that share a part of the graph. So on
    one device only such tensors are joined: see `groups_that_share`.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(alias(tensor, 0) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def groups_that_share(makers: Sequence[Any]) -> list[list[int]]:
    """Groups of at least two positions, whose nodes in ``makers`` share a node with saved tensors further back.

    The search goes back in the order of the engine, and ends when all positions are one group. It leaves out a node if
    a user's Python function behind it does not serve the whole group: that would get zeros in place of ``None``.
    """
    group_of = [*range(len(makers))]  # by position
    reached: dict[Any, set[int]] = {}  # for each node the positions in front of it
    users_nodes: list[Any] = []  # nodes of users' Python functions
    queue: list[tuple[int, int, Any]] = []  # by sequence number, highest first

    def reach(node: Any, positions: set[int]) -> None:
        before = reached.get(node, set())
        if not positions <= before:
            reached[node] = before | positions
            heapq.heappush(queue, (-_torch.sequence_nr(node), id(node), node))

    for position, maker in enumerate(makers):
        reach(maker, {position})
    while queue and len({*group_of}) > 1:
        *_, node = heapq.heappop(queue)
        positions, kind = reached[node], node.__class__
        if _is_users(kind):
            users_nodes.append(node)
        if len(positions) > 1 and _saves_tensors(kind):
            groups = {group_of[position] for position in positions}
            group_of = [min(groups) if group in groups else group for group in group_of]
        for following, _ in node.next_functions:
            if following is not None and following.next_functions:  # a node without any is `AccumulateGrad`
                reach(following, positions)
    members = [[at for at, group in enumerate(group_of) if group == first] for first in dict.fromkeys(group_of)]
    kept: list[list[int]] = []
    for group in members:
        partly = [reached[node] for node in users_nodes if not reached[node].issuperset(group)]
        kept.append([position for position in group if not any(position in positions for positions in partly)])
    return [group for group in kept if len(group) > 1]


@cache
def _saves_tensors(kind: Any) -> bool:
    """True for nodes that may save tensors: nodes of torch, and of users' Python functions."""
    return _is_users(kind) or (not _is_ours(kind) and any(name.startswith("_raw_saved_") for name in dir(kind)))


def _is_ours(kind: Any) -> bool:
    return issubclass(getattr(kind, "_forward_cls", object), Node)


def _is_users(kind: Any) -> bool:
    return issubclass(kind, BackwardCFunction) and not _is_ours(kind)
