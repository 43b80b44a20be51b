"""The nodes of buckets whose sums go on after the slots, and the passes of their module.

The nodes of all buckets are one row, and tokens keep its order.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.bucket_nodes import FromSource, ToSlots
from dataparallel.autograd.node import Node, run_before_last, run_last
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass
from dataparallel.batches.structures import tensors_in
from dataparallel.gradients.gradient_sums import PersistentToSlots, reached_sources
from dataparallel.gradients.ordered_pass import OrderedPass, Reducer
from dataparallel.gradients.reducer_buckets import ReducerBucket, ReducerSums

_numbers = count()

_LEFTOVER = 5.0
"""Seconds for the engine's threads to leave a pass that has failed, before the next one is refused."""


class OrderedBuckets:
    """The buckets of copies that were made together, in their order. The nodes of their graph hold it.

    Attributes:
        streams: the computing streams of the forward.
        when_arrived: called when a pass has succeeded on all machines.
        number: those that were made later have higher ones.
        contents: what all machines have to agree on.
        firsts: the position of each bucket's first parameter among all, and their number.
    """

    def __init__(
        self,
        passes: Passes,
        buckets: Sequence[ReducerBucket],
        streams: dict[torch.device, torch.Stream],
        when_arrived: Callable[[], None],
    ) -> None:
        self.passes, self.buckets, self.streams, self.when_arrived = passes, list(buckets), streams, when_arrived
        self.number = next(_numbers)
        self.contents = "\n".join(f"{i}: {bucket.describe()}" for i, bucket in enumerate(buckets))
        self.firsts = [0, *accumulate(len(bucket.names) for bucket in self.buckets)]
        self._end: weakref.ref[Any] | None = None
        self._on_slots: list[list[weakref.ref[Any]]] = [[] for _ in self.buckets]

    def make_sources(self) -> tuple[list[Tensor], Tensor]:
        """Makes the nodes that the sums go to: for each bucket a handle, and the first token. ::

            parameters <-- FromArrived <-- AllArrived <-- EndOfLaunches <-- LaunchBucket of the last bucket
                                                                        <-- ... <-- LaunchBucket of the first bucket

        Every `FromArrived` follows `AllArrived`, also those of buckets that a pass does not reach. So nobody waits
        before all is launched, and no ``.grad`` is written before the pass has succeeded everywhere.

        On the CPU one thread runs all nodes, and `EndOfLaunches` and `AllArrived` run when nothing else is ready. So an
        error anywhere in this machine's backward comes before its end. The threads of accelerators never block:
        `AllArrived` runs in the thread that has called ``backward``.
        """
        handles: list[Tensor] = []
        tokens: list[Tensor] = []
        for index, bucket in enumerate(self.buckets):
            handle, token = FromArrived.apply(*bucket.sources)
            node: Any = handle.grad_fn
            node.ordered, node.index = self, index
            run_last(handle.grad_fn)
            handles.append(handle)
            tokens.append(token)
        token = EndOfLaunches.apply(self, AllArrived.apply(self, *tokens))
        self._end = weakref.ref(token.grad_fn)
        self.passes.ordered.add(self)
        return handles, token

    def make_to_slots(self, index: int, arguments: Sequence[Any], token: Tensor) -> Sequence[Tensor]:
        """Makes a bucket's `LaunchBucket`. Its last output is the token for the bucket before."""
        outputs: tuple[Tensor, ...] = LaunchBucket.apply(*arguments, token)
        node: Any = outputs[-1].grad_fn
        node.ordered, node.index = self, index
        return outputs

    def note_copies(self, index: int, on_slots: Sequence[Sequence[Tensor]]) -> None:
        """Notes a bucket's copies on the slots, to ask the engine which of them a pass reaches."""
        self._on_slots[index] = [weakref.ref(copies[0].grad_fn) for copies in on_slots]

    def is_reached(self) -> bool:
        """True if the running pass goes over these buckets."""
        end = None if self._end is None else self._end()
        return end is not None and _torch.will_engine_execute_node(end)

    def reached(self) -> list[tuple[bool, set[int]]]:
        """`reached_sources` of each bucket, in the running pass."""
        end = None if self._end is None else self._end()
        assert end is not None
        ((all_arrived, _),) = [following for following in end.next_functions if following[0] is not None]
        nodes = [node for node, _ in all_arrived.next_functions if node is not None]
        return [reached_sources(node, bucket.sources) for node, bucket in zip(nodes, self.buckets, strict=True)]

    def has_gradients(self) -> list[bool]:
        """For each bucket: if the running pass reaches its copies on a slot."""
        return [
            any(_torch.will_engine_execute_node(node) for found in of_bucket if (node := found()) is not None)
            for of_bucket in self._on_slots
        ]


class LaunchBucket(PersistentToSlots):
    """A bucket's node; see `PersistentToSlots`. ``node.ordered`` and ``node.index`` say which one it is.

    Before its own bucket it launches earlier ones that this pass does not reach: the engine would have run them before.
    It runs later ones in any case. So each pass launches all buckets in their order, on every machine.
    """

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        """Launches the sums over the slots, or keeps the gradients."""
        by_slot = ToSlots.take_gradients(envelopes[:-1])
        running = ctx.ordered.passes.running_over(ctx.ordered)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True leads to the parameters of a module that is replicated over "
                "machines or has a communication hook: what happens to its sums cannot be recorded. Use "
                "create_graph=True with inputs= that do not include its parameters, or leave it out"
            )
        with ToSlots.computing_streams_set(ctx):
            if running.is_on:
                running.launch_bucket(ctx, ctx.index, by_slot)
                return None, None, None, None
            kept = running.keep_on_slots(ctx.index, by_slot)
            return None, None, None if kept is None else ToSlots.envelope_of(ctx, kept), None


class EndOfLaunches(Node):
    """``EndOfLaunches.apply(ordered, token)``: the token of the last bucket. Backward says that all is launched."""

    @staticmethod
    def forward(ctx: Any, ordered: OrderedBuckets, token: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.ordered = ordered
        run_before_last(ctx)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[None, None]:
        ctx.ordered.passes.running_over(ctx.ordered).end_launches()
        return None, None


class AllArrived(Node):
    """``AllArrived.apply(ordered, *tokens)``: a token. Backward blocks until all that was launched has arrived."""

    @staticmethod
    def forward(ctx: Any, ordered: OrderedBuckets, *tokens: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.ordered, ctx.count = ordered, len(tokens)
        run_last(ctx)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[None, ...]:
        ctx.ordered.passes.running_over(ctx.ordered).wait_for_all()
        return (None,) * (1 + ctx.count)


class FromArrived(FromSource):
    """``FromArrived.apply(*tensors)``: a handle for them, and a token. Backward returns what has arrived."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        return FromSource.forward(ctx, *tensors), torch.empty(0)

    @staticmethod
    def backward(ctx: Any, envelope: Tensor | None, token: Tensor | None = None) -> tuple[Tensor | None, ...]:
        running = ctx.ordered.passes.running_over(ctx.ordered)
        return tuple(running.take_gradients(ctx.index)) if running.is_on else FromSource.backward(ctx, envelope)


class Passes:
    """All passes of one module. A hook on the outputs of a call notices where a pass begins.

    A pass may go over the copies of several forwards: then those that were made first have their turn first.

    Attributes:
        reducer: what follows the slots.
        sums: the gradients that wait.
        ordered: the buckets of all forwards whose graphs still exist.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer, self.sums = reducer, ReducerSums()
        self.ordered: weakref.WeakSet[OrderedBuckets] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._under_way: set[PassOfBackward] = set()  # those that go over buckets of this module

    def notice_passes_of(self, output: Any) -> None:
        """Notices each pass that begins with the output of a call."""
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self.begin_pass)

    @_torch.not_traced
    def begin_pass(self, grad: Tensor | None = None) -> None:
        """Notices the running pass: a hook on the outputs of calls."""
        running = running_pass()
        with self._changed:
            if self in running.contents:
                return
            self._wait_for_leftovers()
            running.get(self, self._begin)  # another thread of the same pass may have waited too

    def running_over(self, ordered: OrderedBuckets) -> OrderedPass:
        """The running pass over these buckets.

        Raises:
            RuntimeError: it is nested in another one.
        """
        running = running_pass()
        with self._changed:
            if self not in running.contents and self._under_way:  # it did not come by the outputs of a call
                raise _nested()
            return running.get(self, self._begin)[ordered]

    def _begin(self, running: PassOfBackward) -> dict[OrderedBuckets, OrderedPass]:
        before: OrderedPass | None = None
        passes: dict[OrderedBuckets, OrderedPass] = {}
        for ordered in sorted(self.ordered, key=lambda ordered: ordered.number):
            if ordered.is_reached():
                before = passes[ordered] = OrderedPass(ordered, before)
        if passes:
            self._under_way.add(running)
        running.on_end(partial(self._end_pass, running, passes))
        return passes

    def _wait_for_leftovers(self) -> None:
        """Waits until no other pass is under way. One that has failed may still be in a thread of the engine."""
        until = time.monotonic() + _LEFTOVER
        while self._under_way:
            if not self._changed.wait(max(0.0, until - time.monotonic())):
                raise _nested()

    def _end_pass(self, ended: PassOfBackward, passes: dict[OrderedBuckets, OrderedPass], ok: bool) -> None:
        try:
            if not ok:
                for each in passes.values():
                    each.fail(error_of_failed_pass())
        finally:
            with self._changed:
                self._under_way.discard(ended)
                self._changed.notify_all()


def _nested() -> RuntimeError:
    return RuntimeError(
        "a backward has reached the parameters of a module, whose sums go on to other machines or to a hook, while "
        "another backward of the module is under way. If a checkpoint inside it nests them, pass "
        "use_reentrant=False to it; if two threads run them, run one after the other"
    )
