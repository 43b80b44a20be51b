"""`OrderedPass` launches the summed buckets of one backward in a fixed order, each as a call of a `Reducer`.

All machines launch the same buckets in the same order, with zeros for what a machine has not got, and end the pass. If
backward fails on one of them, it tells the others. `BucketRow` has the nodes of the buckets: tokens link them, so that
backward runs them in one order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.bucket_gradients import FromSource, SlotGradients, SourceGradients, ToSlots
from dataparallel.autograd.node import Node, run_before_last, run_last
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass, wait_for_passes
from dataparallel.batches.structures import tensors_in
from dataparallel.comm.buckets import unflatten
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.gradients.comm_hooks import GradBucket
from dataparallel.gradients.gradient_sums import (
    KeptToSlots,
    ReducerBucket,
    ReducerSums,
    TakenGradients,
    reached_sources,
)
from dataparallel.weak_members import WeakMembers

_numbers = count()

_FAILED_PASS_TIMEOUT = 5.0
"""Seconds that a backward waits for the engine's threads to leave one that has failed. Then it raises."""


class LearntOrder(Protocol):
    """The order of parameters in buckets, which a pass shows: rank 0's is sent at its end, and all ranks keep to it."""

    def proposal(self) -> Sequence[int] | None:
        """The order in which gradients have come here; ``None`` if the order is known."""

    def agree(self, order: Sequence[int] | None) -> None:
        """Called when a pass has succeeded on all machines, with what rank 0 has proposed."""


class BucketRow:
    """The ordered buckets of copies that were made together. The nodes in the graph of these copies hold it.

    Attributes:
        number: a row that was made later has a higher number.
        contents: describes the buckets; all machines have to have the same.
        first_positions: the position of each bucket's first parameter in the list of all parameters, then its length.
    """

    def __init__(
        self,
        passes: ModulePasses,
        buckets: Sequence[ReducerBucket],
        streams: dict[torch.device, torch.Stream],
        order: LearntOrder,
    ) -> None:
        self.passes, self.buckets, self.streams, self.order = passes, list(buckets), streams, order
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
            # One that has failed may still be in a thread of the engine.
            if not wait_for_passes(self._changed, lambda: not self._backward_passes, _FAILED_PASS_TIMEOUT):
                raise _nested()
            backward.get(self, self._make_passes)  # another thread of the same backward may have waited too

    def pass_over(self, row: BucketRow) -> OrderedPass:
        """Returns the pass of the running backward over ``row``. The backward may not be nested in another one."""
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


_PREVIOUS_PASS_TIMEOUT = 300.0
"""Seconds that a pass waits for the pass before it in the same backward. Only an error makes the wait that long."""


class AsyncResult(Protocol):
    """The result of work that a reducer has begun."""

    def wait(self) -> Any:
        """Blocks the host until the work is done, and returns its result or raises its error.

        After `ReducerPass.launch` the result is the reduced flat tensor, the launched one or one like it, ordered on
        the current stream. After `ReducerPass.end_pass`: for each parameter, True if some machine has used it; and the
        order of rank 0, if it has said one.
        """


class ReducerPass(Protocol):
    """One pass of a `Reducer`.

    Attributes:
        takes_all_or_none: true if a pass that fails has to launch its missing buckets, with zeros: only a hook knows of
            other processes, which wait.
    """

    takes_all_or_none: bool

    def launch(self, bucket: GradBucket) -> AsyncResult | None:
        """Begins to reduce a bucket, whose buffer it may write to and keep.

        Called in the order of buckets, in any thread, which it does not block if it can. A parameter that no slot has
        used has zeros in the bucket. Returns ``None`` if an earlier launch of this pass has raised: then nobody waits.
        """

    def end_pass(self, used: Sequence[bool], order: Sequence[int] | None) -> AsyncResult:
        """Called after the last bucket. ``used`` says for each parameter of all buckets if it has a gradient here.

        ``order``: the order in which gradients have come here, if the pass is to learn it.
        """

    def fail(self, error: BaseException) -> None:
        """The pass has failed here before its end: tells the other machines, which would wait. Nobody waits here."""


class Reducer(Protocol):
    """Reduces the summed gradients of one module further. Another reducer can take its place between steps."""

    def begin_pass(self, contents: str) -> ReducerPass:
        """Begins a pass. ``contents`` says which parameters are in which bucket, and is equal on all machines."""


class _BucketInFlight(NamedTuple):
    """A bucket that was launched and not waited for."""

    result: AsyncResult | None
    flat: Tensor
    sums: SourceGradients | None  # holds the memory of ``flat``
    launch_event: Event | None  # recorded on the side stream after the launch; None without side streams


class OrderedPass:
    """One backward over one `BucketRow`. In each thread of the engine one node at a time uses it.

    A backward over several forwards has one `OrderedPass` for each row, and they launch one after the other.

    Attributes:
        is_reduced: True if the reducer gets the sums; False if the gradients stay on the slots.
    """

    def __init__(self, row: BucketRow, previous: OrderedPass | None) -> None:
        self._row = row
        self._previous, self._next = previous, None  # `_previous` becomes None when that pass has ended
        if previous is not None:
            previous._next = self
        self._sources_reached = row.reached_sources()  # of each bucket: if it is reached, and the positions written
        self._has_gradients = row.has_gradients()
        self._kept_gradients = row.passes.sums
        self.is_reduced = self._kept_gradients.are_on or not any(written for _, written in self._sources_reached)
        self._lock = threading.RLock()
        self._postponed: list[Callable[[], None]] = []  # launches that wait for `_previous`
        self._next_index = 0  # the first bucket that no node has launched or postponed
        self._reducer_pass = row.passes.reducer.begin_pass(row.contents) if self.is_reduced else None
        self._in_flight: list[_BucketInFlight] = []
        self._used_here: list[bool] = []
        self._taken: list[TakenGradients] = []
        self._is_end_requested = self._is_end_sent = False  # the end is sent after that of `_previous`
        self._end_result: AsyncResult | None = None
        self._may_wait = threading.Event()  # set when the end was sent, or the pass has failed
        self._reduced: list[Tensor | None] = []  # the flat tensor of each bucket
        self._used_anywhere: Sequence[bool] = ()

    def keep_on_slots(self, index: int, by_slot: Sequence[SlotGradients | None]) -> list[Tensor | None] | None:
        """Keeps a bucket's gradients on the slots; see `GradientSums.keep`."""
        is_reached, written = self._sources_reached[index]
        if not is_reached:
            return None
        bucket = self._row.buckets[index]
        if not bucket.has_leaves_only:
            raise RuntimeError(
                "gradients cannot stay on the slots here: a buffer of the module is the result of a computation, and "
                "its gradient goes on into that graph. Leave out no_sync, or detach the buffer"
            )
        return self._kept_gradients.keep(bucket, by_slot, written)

    def launch_bucket(self, ctx: Any, index: int, by_slot: Sequence[SlotGradients | None]) -> None:
        """Launches a bucket, and the buckets next to it that have no gradients in this backward.

        On an accelerator the thread that launches the last bucket also ends the launches: the thread that called
        ``backward`` may already block in `wait_for_all` of another module.
        """
        if index < self._next_index:  # it was launched together with an earlier bucket
            return
        nothing = [None] * len(by_slot)
        while self._next_index < index:
            self._launch_next(ctx, nothing)
        self._launch_next(ctx, by_slot)
        while self._next_index < len(self._row.buckets) and not self._has_gradients[self._next_index]:
            self._launch_next(ctx, nothing)
        if self._next_index == len(self._row.buckets) and ctx.source_device.type != "cpu":
            self.end_launches()

    def _launch_next(self, ctx: Any, by_slot: Sequence[SlotGradients | None]) -> None:
        bucket = self._row.buckets[self._next_index]
        taken = self._kept_gradients.take_to_send(bucket, self._sources_reached[self._next_index][1])
        if taken.kept:
            self._taken.append(taken)
            with ToSlots.adding_streams_set(ctx):
                by_slot = bucket.with_kept_gradients(by_slot, taken.kept)
        sums = ToSlots.sum_over_slots(ctx, by_slot)
        grads = [None] * len(bucket.names) if sums is None else sums.grads_on_side_streams
        self._used_here += [grad is not None for grad in grads]
        streams = ctx.gradient_streams
        sides = {} if streams is None else dict(streams.sides)
        with ToSlots.adding_streams_set(ctx):
            if sums is not None and sums.flat is not None and bucket.is_laid_out(sums):
                flat = sums.flat
            else:
                flat = bucket.zeros() if sums is None else bucket.flatten(grads)
                if streams is not None:  # allocated on a side stream, used on the computing stream
                    flat.record_stream(streams.computing[ctx.source_device])
        self._launch(self._next_index, flat, sums, sides)
        self._next_index += 1

    def _launch(
        self, index: int, flat: Tensor, sums: SourceGradients | None, sides: dict[torch.device, torch.Stream]
    ) -> None:
        """Launches a bucket with the side streams ``sides`` current, now or when the previous pass has ended."""
        row, bucket = self._row, self._row.buckets[index]
        members = bucket.layout.indices
        parameters, names = [bucket.sources[i] for i in members], [bucket.names[i] for i in members]
        summed, reducer_pass = GradBucket(index, len(row.buckets), flat, parameters, names), self._reducer_pass

        def launch() -> None:
            assert reducer_pass is not None
            with streams_set(sides):
                result = reducer_pass.launch(summed)
                launch_event = Event(sides[flat.device]) if sides else None
            self._in_flight.append(_BucketInFlight(result, flat, sums, launch_event))

        self._run_or_postpone(launch)

    def end_launches(self) -> None:
        """Ends the pass after its last launch. Later calls do nothing."""
        if self._is_end_requested:
            return
        self._is_end_requested = True
        if self.is_reduced:
            self._run_or_postpone(self._send_end)
        self._release_next_pass()

    def _send_end(self) -> None:
        assert self._reducer_pass is not None
        self._is_end_sent = True
        self._end_result = self._reducer_pass.end_pass(self._used_here, self._row.order.proposal())
        self._may_wait.set()

    def _run_or_postpone(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._previous is not None:
                self._postponed.append(action)
                return
        action()

    def _release_next_pass(self) -> None:
        """Runs what the next pass has postponed, unless this pass still waits for the previous one itself."""
        following = self._next
        if following is not None and self._previous is None:
            with following._lock:
                following._previous = None
                postponed, following._postponed = following._postponed, []
                for action in postponed:
                    action()
            if following._is_end_sent or not following.is_reduced:
                following._release_next_pass()

    def wait_for_all(self) -> None:
        """Blocks until all buckets are reduced; the computing streams are ordered after them."""
        if not self.is_reduced:
            return
        if not self._may_wait.wait(_PREVIOUS_PASS_TIMEOUT):  # only in a pass over several forwards, on accelerators
            raise RuntimeError(
                f"after {_PREVIOUS_PASS_TIMEOUT:g} s the gradients of an earlier forward of this backward have not "
                "been launched: an error has ended their part of it"
            )
        # `launch_event` orders the computing stream after the launch. The memory of the sums is held until then.
        streams = self._row.streams
        with streams_set(streams):
            while self._in_flight:
                result, flat, sums, launch_event = self._in_flight[0]
                if launch_event is not None:
                    launch_event.make_wait(streams[flat.device])
                assert result is not None
                self._reduced.append(result.wait())
                if sums is not None:
                    sums.take()
                del self._in_flight[0], result, flat, sums
        assert self._end_result is not None
        self._used_anywhere, order = self._end_result.wait()
        with streams_set(self._row.streams):
            while self._taken:
                self._kept_gradients.remove_from_grads(self._taken.pop())
        self._row.order.agree(order)

    def take_gradients(self, index: int) -> list[Tensor | None]:
        """The reduced gradients of a bucket; ``None`` for parameters that no machine has used."""
        bucket, first = self._row.buckets[index], self._row.first_positions[index]
        grads: list[Tensor | None] = [None] * len(bucket.names)
        flat, self._reduced[index] = self._reduced[index], None
        assert flat is not None
        for i, grad in zip(bucket.layout.indices, unflatten(bucket.layout, flat), strict=True):
            if self._used_anywhere[first + i]:
                grads[i] = grad
        return grads

    # ---- when backward has failed ------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Backward has failed here: tells the other machines, and puts kept gradients back."""
        try:
            self._postponed.clear()
            if self._reducer_pass is not None and not self._is_end_sent:
                self._is_end_sent = True
                missing = range(len(self._in_flight), len(self._row.buckets))
                for index in missing if self._in_flight and self._reducer_pass.takes_all_or_none else ():
                    self._launch(index, self._row.buckets[index].zeros(), None, {})
                self._reducer_pass.fail(error)
        finally:
            for taken in self._taken:
                self._kept_gradients.put_back(taken)
            self._taken.clear()
            self._in_flight.clear()
            self._may_wait.set()
            self._release_next_pass()
