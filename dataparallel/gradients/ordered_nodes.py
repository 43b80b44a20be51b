"""`BucketRow` makes the autograd nodes of buckets that a `Reducer` reduces, and `ModulePasses` the passes over them.

Tokens link the nodes of all buckets, each one's input being an output of another. So backward runs them in one order.
"""

from __future__ import annotations

import threading
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
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass, wait_for_passes
from dataparallel.batches.structures import tensors_in
from dataparallel.gradients.gradient_sums import KeptToSlots, reached_sources
from dataparallel.gradients.ordered_pass import OrderedPass, Reducer
from dataparallel.gradients.reducer_buckets import ReducerBucket, ReducerSums
from dataparallel.weak_members import WeakMembers

_numbers = count()

_FAILED_PASS_TIMEOUT = 5.0
"""Seconds that a backward waits for the engine's threads to leave one that has failed. Then it raises."""


class BucketRow:
    """The ordered buckets of copies that were made together. The nodes in the graph of these copies hold it.

    Attributes:
        streams: the computing streams of the forward.
        on_success: called when a pass has succeeded on all machines.
        number: a row that was made later has a higher number.
        contents: describes the buckets; all machines have to have the same.
        first_positions: the position of each bucket's first parameter in the list of all parameters, then its length.
    """

    def __init__(
        self,
        passes: ModulePasses,
        buckets: Sequence[ReducerBucket],
        streams: dict[torch.device, torch.Stream],
        on_success: Callable[[], None],
    ) -> None:
        self.passes, self.buckets, self.streams, self.on_success = passes, list(buckets), streams, on_success
        self.number = next(_numbers)
        self.contents = "\n".join(f"{i}: {bucket.describe()}" for i, bucket in enumerate(buckets))
        self.first_positions = [0, *accumulate(len(bucket.names) for bucket in self.buckets)]
        self._copy_nodes: list[list[weakref.ref[Any]]] = [[] for _ in self.buckets]

    def make_source_nodes(self) -> tuple[list[Tensor], Tensor]:
        """Makes the nodes behind `LaunchBucket` in backward. Returns a handle for each bucket, and the first token. ::

            parameters <-- FromReducer <-- WaitForAll <-- EndLaunches <-- LaunchBucket of the last bucket
                                                                        <-- ... <-- LaunchBucket of the first bucket

        Every `FromReducer` follows `WaitForAll`, even if the pass does not reach its bucket. So nobody waits before all
        buckets are launched, and no ``.grad`` is written before the pass has succeeded on all machines.

        On the CPU one thread runs all nodes, `EndLaunches` and `WaitForAll` last, so after any error of this machine's
        backward. Threads of accelerators never block: `WaitForAll` runs in the thread that has called ``backward``.
        """
        handles: list[Tensor] = []
        tokens: list[Tensor] = []
        for index, bucket in enumerate(self.buckets):
            handle, token = FromReducer.apply(*bucket.sources)
            node: Any = handle.grad_fn
            node.row, node.index = self, index
            run_last(handle.grad_fn)
            handles.append(handle)
            tokens.append(token)
        token = EndLaunches.apply(self, WaitForAll.apply(self, *tokens))
        self._end_node: weakref.ref[Any] = weakref.ref(token.grad_fn)
        self.passes.rows.add(self)
        return handles, token

    def make_launch_node(self, index: int, arguments: Sequence[Any], token: Tensor) -> Sequence[Tensor]:
        """Makes a bucket's `LaunchBucket` node. Its last output is the token for the previous bucket's node."""
        outputs: tuple[Tensor, ...] = LaunchBucket.apply(*arguments, token)
        node: Any = outputs[-1].grad_fn
        node.row, node.index = self, index
        return outputs

    def note_copies(self, index: int, on_slots: Sequence[Sequence[Tensor]]) -> None:
        """Notes the nodes of a bucket's copies on the slots, for `has_gradients`."""
        self._copy_nodes[index] = [weakref.ref(copies[0].grad_fn) for copies in on_slots]

    def is_reached(self) -> bool:
        """True if the running backward reaches these buckets."""
        end_node = self._end_node()
        return end_node is not None and _torch.will_engine_execute_node(end_node)

    def reached_sources(self) -> list[tuple[bool, set[int]]]:
        """Calls `reached_sources` for each bucket, in the running backward."""
        end_node = self._end_node()
        assert end_node is not None
        ((wait_node, _),) = [following for following in end_node.next_functions if following[0] is not None]
        nodes = [node for node, _ in wait_node.next_functions if node is not None]
        return [reached_sources(node, bucket.sources) for node, bucket in zip(nodes, self.buckets, strict=True)]

    def has_gradients(self) -> list[bool]:
        """Returns for each bucket True if the running backward reaches the bucket's copies on some slot."""
        return [
            any(_torch.will_engine_execute_node(node) for reference in references if (node := reference()) is not None)
            for references in self._copy_nodes
        ]


class LaunchBucket(KeptToSlots):
    """The `KeptToSlots` of a bucket in a `BucketRow`: bucket ``node.index`` of ``node.row``.

    The engine runs the first node that it reaches and all later ones. The first one launches the earlier buckets too,
    which have no gradients. So each pass launches all buckets in their order, on every machine.
    """

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        """Sums the bucket over the slots and launches it, or keeps its gradients on the slots."""
        by_slot = ToSlots.take_gradients(envelopes[:-1])
        this_pass = ctx.row.passes.pass_over(ctx.row)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True leads to the parameters of a module that is replicated over "
                "machines or has a communication hook: what happens to its sums cannot be recorded. Use "
                "create_graph=True with inputs= that do not include its parameters, or leave it out"
            )
        with ToSlots.computing_streams_set(ctx):
            if this_pass.is_reduced:
                this_pass.launch_bucket(ctx, ctx.index, by_slot)
                return None, None, None, None
            slot_0 = this_pass.keep_on_slots(ctx.index, by_slot)
            return None, None, None if slot_0 is None else ToSlots.envelope_of(ctx, slot_0), None


class EndLaunches(Node):
    """``EndLaunches.apply(row, token)`` returns the last bucket's token. Backward ends the launches of the pass."""

    @staticmethod
    def forward(ctx: Any, row: BucketRow, token: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.row = row
        run_before_last(ctx)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[None, None]:
        ctx.row.passes.pass_over(ctx.row).end_launches()
        return None, None


class WaitForAll(Node):
    """``WaitForAll.apply(row, *tokens)`` returns a token. Backward blocks until all buckets are reduced."""

    @staticmethod
    def forward(ctx: Any, row: BucketRow, *tokens: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.row, ctx.count = row, len(tokens)
        run_last(ctx)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[None, ...]:
        ctx.row.passes.pass_over(ctx.row).wait_for_all()
        return (None,) * (1 + ctx.count)


class FromReducer(FromSource):
    """``FromReducer.apply(*tensors)`` returns a handle for them, and a token. Backward returns reduced gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        return FromSource.forward(ctx, *tensors), torch.empty(0)

    @staticmethod
    def backward(ctx: Any, envelope: Tensor | None, token: Tensor | None = None) -> tuple[Tensor | None, ...]:
        this_pass = ctx.row.passes.pass_over(ctx.row)
        is_reduced = this_pass.is_reduced
        return tuple(this_pass.take_gradients(ctx.index)) if is_reduced else FromSource.backward(ctx, envelope)


class ModulePasses:
    """The `OrderedPass` objects of one module. Only one backward at a time goes over the module.

    A hook on the outputs of a call notices where a backward begins. Of several rows the oldest is launched first.

    Attributes:
        reducer: reduces the sums over the slots further.
        sums: the module's gradients that wait on slots.
        rows: the buckets of all forwards whose graphs still exist.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer, self.sums = reducer, ReducerSums()
        self.rows: WeakMembers[BucketRow] = WeakMembers()
        self._changed = threading.Condition()
        self._backward_passes: set[PassOfBackward] = set()  # the running ones that go over buckets of this module

    def notice_passes_of(self, output: Any) -> None:
        """Makes each backward that begins with this output of a call run `begin_pass`."""
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self.begin_pass)

    @_torch.not_traced
    def begin_pass(self, grad: Tensor | None = None) -> None:
        """Begins the passes of the running backward, once. It is a hook on the outputs of calls."""
        backward = running_pass()
        with self._changed:
            if self in backward.contents:
                return
            self._wait_for_other_passes()
            backward.get(self, self._make_passes)  # another thread of the same backward may have waited too

    def pass_over(self, row: BucketRow) -> OrderedPass:
        """Returns the pass of the running backward over ``row``.

        Raises:
            RuntimeError: the backward is nested in another one.
        """
        backward = running_pass()
        with self._changed:
            if self not in backward.contents and self._backward_passes:  # no hook on an output has noticed it
                raise _nested()
            return backward.get(self, self._make_passes)[row]

    def _make_passes(self, backward: PassOfBackward) -> dict[BucketRow, OrderedPass]:
        previous: OrderedPass | None = None
        passes: dict[BucketRow, OrderedPass] = {}
        for row in sorted(self.rows, key=lambda row: row.number):
            if row.is_reached():
                previous = passes[row] = OrderedPass(row, previous)
        if passes:
            self._backward_passes.add(backward)
        backward.on_end(partial(self._end_passes, backward, passes))
        return passes

    def _wait_for_other_passes(self) -> None:
        """Waits until no other backward runs here. One that has failed may still be in a thread of the engine."""
        if not wait_for_passes(self._changed, lambda: not self._backward_passes, _FAILED_PASS_TIMEOUT):
            raise _nested()

    def _end_passes(self, backward: PassOfBackward, passes: dict[BucketRow, OrderedPass], ok: bool) -> None:
        try:
            if not ok:
                for ordered_pass in passes.values():
                    ordered_pass.fail(error_of_failed_pass())
        finally:
            with self._changed:
                self._backward_passes.discard(backward)
                self._changed.notify_all()


def _nested() -> RuntimeError:
    return RuntimeError(
        "a backward has reached the parameters of a module, whose sums go on to other machines or to a hook, while "
        "another backward of the module is under way. If a checkpoint inside it nests them, pass "
        "use_reentrant=False to it; if two threads run them, run one after the other"
    )
