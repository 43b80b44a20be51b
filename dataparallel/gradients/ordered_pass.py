"""`OrderedPass` launches the summed buckets of one backward in a fixed order, each as a call of a `Reducer`.

All machines launch the same buckets in the same order, with zeros for what a machine has not got, and end the pass. If
backward fails on one of them, it tells the others. `BucketRow` has the buckets of one forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.bucket_gradients import FromSource, SlotGradients, SourceGradients, ToSlots
from dataparallel.autograd.node import Node, run_last
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass, wait_for_passes
from dataparallel.batches.structures import tensors_in
from dataparallel.comm.buckets import unflatten
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.gradients.comm_hooks import GradBucket
from dataparallel.gradients.gradient_sums import ReducerBucket, ReducerSums, WaitingGradients, written_sources
from dataparallel.weak_members import WeakMembers

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
        self.contents = "\n".join(f"{i}: {bucket.describe()}" for i, bucket in enumerate(buckets))
        self.first_positions = [0, *accumulate(len(bucket.names) for bucket in self.buckets)]
        self._sum_nodes: dict[int, weakref.ref[Any]] = {}  # the `ToSlots` of each bucket

    def make_source_nodes(self) -> tuple[list[Tensor], Tensor]:
        """Makes the nodes behind `ToSlots` in backward. Returns a handle for each bucket, and a token for all. ::

            parameters <-- FromReducer <-- WaitForAll <-- ToSlots of all buckets

        Every `FromReducer` follows `WaitForAll`, even if the pass does not reach its bucket. So nobody waits before all
        buckets are launched, and no ``.grad`` is written before the pass has succeeded on all machines.

        On the CPU one thread runs all nodes, `WaitForAll` last, so after any error of this machine's backward. Threads
        of accelerators never block: `WaitForAll` runs in the thread that has called ``backward``.
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
        token = WaitForAll.apply(self, *tokens)
        self._wait_node: weakref.ref[Any] = weakref.ref(token.grad_fn)
        self.passes.rows.add(self)
        return handles, token

    def note_copies(self, index: int, on_slots: Sequence[Sequence[Tensor]]) -> None:
        """Notes the `ToSlots` of a bucket, which the nodes of the bucket's copies lead to."""
        node: Any = on_slots[0][0].grad_fn
        self._sum_nodes[index] = weakref.ref(node.next_functions[0][0])

    def sum(self, index: int, node: Any, by_slot: Sequence[SlotGradients | None]) -> SourceGradients | None:
        """Sums a bucket over the slots and launches it, or keeps its gradients on the slots; see `SumsOfBucket`."""
        this_pass = self.passes.pass_over(self)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True leads to the parameters of a module that is replicated over "
                "machines or has a communication hook: what happens to its sums cannot be recorded. Use "
                "create_graph=True with inputs= that do not include its parameters, or leave it out"
            )
        if not this_pass.is_reduced:
            return this_pass.keep_on_slots(node, index, by_slot)
        this_pass.launch(node, index, by_slot)
        return None

    def is_reached(self) -> bool:
        """True if the running backward reaches these buckets."""
        wait_node = self._wait_node()
        return wait_node is not None and _torch.will_engine_execute_node(wait_node)

    def written_sources(self) -> list[set[int]]:
        """Calls `written_sources` for each bucket, in the running backward."""
        wait_node = self._wait_node()
        assert wait_node is not None
        nodes = [node for node, _ in wait_node.next_functions if node is not None]
        return [written_sources(node, bucket.sources) for node, bucket in zip(nodes, self.buckets, strict=True)]

    def without_gradients(self) -> list[int]:
        """Returns the numbers of the buckets whose copies the running backward does not reach on any slot."""
        nodes = [(index, reference()) for index, reference in sorted(self._sum_nodes.items())]
        return [index for index, node in nodes if node is None or not _torch.will_engine_execute_node(node)]


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
        this_pass = ctx.row.passes.pass_over(ctx.row)
        for each in _passes_of(running_pass()):
            each.end_if_launched()  # before the wait: other machines may wait for another module's first
        this_pass.wait_for_all()
        return (None,) * (1 + ctx.count)


def _passes_of(backward: PassOfBackward) -> list[OrderedPass]:
    """Returns a list for the passes of all modules in one backward."""
    return backward.get(OrderedPass, lambda _: [])


class FromReducer(FromSource):
    """``FromReducer.apply(*tensors)`` returns a handle for them, and a token. Backward returns reduced gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        return FromSource.forward(ctx, *tensors), torch.empty(0)

    @staticmethod
    def backward(ctx: Any, envelope: Tensor | None, token: Tensor | None = None) -> tuple[Tensor | None, ...]:
        this_pass = ctx.row.passes.pass_over(ctx.row)
        if not this_pass.is_reduced:
            return FromSource.backward(ctx, envelope)
        return FromSource.sparing_hooks(ctx, this_pass.take_gradients(ctx.index))


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
        for row in self.rows:  # the oldest first
            if row.is_reached():
                passes[row] = OrderedPass(row, previous)
                previous = passes[row] if passes[row].is_reduced else previous
        if passes:
            self._backward_passes.add(backward)
        _passes_of(backward).extend(passes.values())
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


class _Bucket(NamedTuple):
    """A bucket that is to be launched, or was launched and not waited for."""

    flat: Tensor
    sums: SourceGradients | None  # holds the memory of ``flat``
    sides: dict[torch.device, torch.Stream]  # the side streams that have made ``flat``
    result: AsyncResult | None = None
    launch_event: Event | None = None  # recorded on the side stream after the launch; None without side streams


class OrderedPass:
    """One backward over one `BucketRow`. Buckets are launched in their order, whenever they come.

    A backward over several forwards has one `OrderedPass` for each row, and they launch one after the other.

    Attributes:
        is_reduced: True if the reducer gets the sums; False if the gradients stay on the slots.
    """

    def __init__(self, row: BucketRow, previous: OrderedPass | None) -> None:
        self._row, self._previous = row, previous
        self._next: OrderedPass | None = None
        self._lock: threading.RLock = threading.RLock() if previous is None else previous._lock
        if previous is not None:
            previous._next = self
        self._written = row.written_sources()
        self._kept_gradients = row.passes.sums
        self.is_reduced = self._kept_gradients.are_on or not any(self._written)
        self._without_gradients = row.without_gradients()
        self._reducer_pass = row.passes.reducer.begin_pass(row.contents) if self.is_reduced else None
        self._ready: dict[int, _Bucket] = {}  # by its number: a bucket that waits for its turn
        self._in_flight: list[_Bucket] = []
        self._used_here: list[list[bool]] = [[] for _ in row.buckets]
        self._taken: list[WaitingGradients] = []
        self._end_result: AsyncResult | None = None
        self._is_over = threading.Event()  # set when the end was sent, or the pass has failed
        self._reduced: list[Tensor | None] = []  # the flat tensor of each bucket
        self._used_anywhere: Sequence[bool] = ()

    def keep_on_slots(self, node: Any, index: int, by_slot: Sequence[SlotGradients | None]) -> SourceGradients:
        """Keeps a bucket's gradients on the slots; see `GradientSums.keep`."""
        bucket = self._row.buckets[index]
        if not bucket.has_leaves_only:
            raise RuntimeError(
                "gradients cannot stay on the slots here: a buffer of the module is the result of a computation, and "
                "its gradient goes on into that graph. Leave out no_sync, or detach the buffer"
            )
        grads = self._kept_gradients.keep(bucket, by_slot, self._written[index])
        return SourceGradients(grads, None, node.source_device)

    def launch(self, node: Any, index: int, by_slot: Sequence[SlotGradients | None]) -> None:
        """Launches a bucket and those after it that are ready, or notes that this one is ready.

        The first call makes those ready that have no gradients in this backward.
        """
        without, self._without_gradients = self._without_gradients, []
        for each in without:
            self._make_ready(node, each, [None] * len(by_slot))
        self._make_ready(node, index, by_slot)
        with self._lock:
            self._launch_ready()

    def _make_ready(self, node: Any, index: int, by_slot: Sequence[SlotGradients | None]) -> None:
        bucket = self._row.buckets[index]
        taken = self._kept_gradients.take_to_send(bucket, self._written[index])
        if taken:
            self._taken += taken
            by_slot = bucket.with_kept_gradients(node, by_slot, taken)
        sums = ToSlots.sum_over_slots(node, by_slot)
        grads = [None] * len(bucket.names) if sums is None else sums.grads_on_side_streams
        self._used_here[index] = [grad is not None for grad in grads]
        streams = node.gradient_streams
        with ToSlots.adding_streams_set(node):
            if sums is not None and sums.flat is not None and bucket.is_laid_out(sums):
                flat = sums.flat
            else:
                flat = bucket.zeros() if sums is None else bucket.flatten(grads)
                if streams is not None:  # allocated on a side stream, used on the computing stream
                    flat.record_stream(streams.computing[node.source_device])
        self._ready[index] = _Bucket(flat, sums, {} if streams is None else dict(streams.sides))

    def _launch_ready(self) -> None:
        """Launches the buckets whose turn it is, under the lock."""
        if self._previous is not None and not self._previous._is_over.is_set():
            return
        while (ready := self._ready.pop(len(self._in_flight), None)) is not None:
            self._launch(ready)
        # The thread that called ``backward`` may already wait for another module. On the CPU it runs all nodes.
        if self._row.buckets[0].sources[0].device.type != "cpu":
            self.end_if_launched()

    def _launch(self, bucket: _Bucket) -> None:
        row, index = self._row, len(self._in_flight)
        layout, names, sources = row.buckets[index].layout, row.buckets[index].names, row.buckets[index].sources
        parameters = [sources[i] for i in layout.indices]
        summed = GradBucket(index, len(row.buckets), bucket.flat, parameters, [names[i] for i in layout.indices])
        assert self._reducer_pass is not None
        with streams_set(bucket.sides):
            result = self._reducer_pass.launch(summed)
            launch_event = Event(bucket.sides[bucket.flat.device]) if bucket.sides else None
        self._in_flight.append(bucket._replace(result=result, launch_event=launch_event))

    def end_if_launched(self) -> None:
        """Ends the pass after its last launch, unless it has ended. Then the next pass launches."""
        with self._lock:
            if self._is_over.is_set() or self._reducer_pass is None or len(self._in_flight) < len(self._row.buckets):
                return
            used = [*chain.from_iterable(self._used_here)]
            self._end_result = self._reducer_pass.end_pass(used, self._row.order.proposal())
            self._is_over.set()
            if self._next is not None:
                self._next._launch_ready()

    def wait_for_all(self) -> None:
        """Blocks until all buckets are reduced; the computing streams are ordered after them."""
        if not self.is_reduced:
            return
        if not self._is_over.wait(_PREVIOUS_PASS_TIMEOUT):  # only in a pass over several forwards, on accelerators
            raise RuntimeError(
                f"after {_PREVIOUS_PASS_TIMEOUT:g} s the gradients of an earlier forward of this backward have not "
                "been launched: an error has ended their part of it"
            )
        # `launch_event` orders the computing stream after the launch. The memory of the sums is held until then.
        streams = self._row.streams
        with streams_set(streams):
            while self._in_flight:
                bucket = self._in_flight[0]
                if bucket.launch_event is not None:
                    bucket.launch_event.make_wait(streams[bucket.flat.device])
                assert bucket.result is not None
                self._reduced.append(bucket.result.wait())
                if bucket.sums is not None:
                    bucket.sums.take()
                del self._in_flight[0], bucket
        assert self._end_result is not None
        self._used_anywhere, order = self._end_result.wait()
        with streams_set(streams):
            taken, self._taken = self._taken, []
            self._kept_gradients.remove_from_grads(taken)
            del taken
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
            if self._reducer_pass is not None and not self._is_over.is_set():
                self._is_over.set()
                missing = range(len(self._in_flight), len(self._row.buckets))
                for index in missing if self._in_flight and self._reducer_pass.takes_all_or_none else ():
                    self._launch(_Bucket(self._row.buckets[index].zeros(), None, {}))
                self._reducer_pass.fail(error)
        finally:
            self._kept_gradients.put_back(self._taken)
            self._taken.clear()
            self._in_flight.clear()
