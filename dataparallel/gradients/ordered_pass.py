"""`ModulePasses` gives the sums of one module's buckets to a `Reducer`: to other machines, or to a communication hook.

All machines launch the same buckets in the same order, with zeros for what a machine has not got, and end the pass. If
backward fails on one of them, it tells the others. `BucketRow` has the buckets of one forward, and `OrderedPass` is one
backward over them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.bucket_gradients import (
    FromSource,
    SlotGradients,
    SourceGradients,
    ToSlots,
    empty_handle,
    envelope_with,
    take_contents,
)
from dataparallel.autograd.node import Node, run_last
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass, wait_for_passes
from dataparallel.batches.structures import tensors_in
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.devices import CPU
from dataparallel.gradients.comm_hooks import GradBucket
from dataparallel.gradients.gradient_sums import ReducerBucket, ReducerSums, WaitingGradients, written_sources
from dataparallel.weak_members import WeakMembers

_FAILED_PASS_TIMEOUT = 5.0
"""Seconds that a backward waits for the engine's threads to leave one that has failed. Then it raises."""

_PREVIOUS_PASS_TIMEOUT = 300.0
"""Seconds that a pass waits for the pass before it in the same backward. Only an error makes the wait that long."""


class AsyncResult(Protocol):
    """The result of work that a reducer has begun. ``wait`` blocks the host, and returns it or raises the error."""

    def wait(self) -> Any: ...


class ReducerPass(Protocol):
    """One pass of a `Reducer`."""

    def launch(self, bucket: GradBucket) -> AsyncResult | None:
        """Begins to reduce a bucket, whose buffer it may write to and keep.

        Called in the order of buckets, in any thread, which it does not block if it can. A parameter that no slot has
        used has zeros in the bucket. The result is the reduced flat tensor, the launched one or one like it, ordered on
        the stream that is current in ``wait``; ``None`` if an earlier launch of this pass has raised.
        """

    def end_pass(self, used: Sequence[bool], order: Sequence[int] | None) -> AsyncResult:
        """Called after the last bucket. ``used`` says for each parameter of all buckets if it has a gradient here.

        ``order``: the order in which gradients have come here, if the pass is to learn it. The result: for each
        parameter, True if some machine has used it; and the order of rank 0, if it has said one.
        """

    def fail(self, error: BaseException, missing: Iterator[GradBucket]) -> None:
        """The pass has failed here: tells the other machines. Nobody waits here.

        ``missing``: the buckets that were not launched, of zeros; none after `end_pass`.
        """


class Reducer(Protocol):
    """Reduces the summed gradients of one module further. Another reducer can take its place between steps."""

    def begin_pass(self, contents: str) -> ReducerPass:
        """Begins a pass. ``contents`` says which parameters are in which bucket, and is equal on all machines."""


class LearntOrder(Protocol):
    """The order of parameters in buckets, which a pass shows: all ranks keep to what rank 0 proposes.

    ``proposal`` is ``None`` if the order is known. ``agree`` is called when a pass has succeeded on all machines.
    """

    def proposal(self) -> Sequence[int] | None: ...

    def agree(self, order: Sequence[int] | None) -> None: ...


class BucketRow:
    """The ordered buckets of copies that were made together. The nodes in the graph of these copies hold it.

    Attributes:
        contents: describes the buckets; all machines have to have the same.
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
        self._sum_nodes: dict[int, weakref.ref[Any]] = {}  # the `ToSlots` of each bucket
        passes.rows.add(self)

    def make_handles(self) -> tuple[Tensor, ...]:
        """Makes the nodes behind `ToSlots` in backward. Returns a handle for each bucket. ::

        parameters <-- FromSource <-- WaitForAll <-- ToSlots of all buckets
        """
        sources = [*chain.from_iterable(bucket.sources for bucket in self.buckets)]
        handle = FromSource.apply(*sources)
        handles: tuple[Tensor, ...] = WaitForAll.apply(self, handle)
        for each in (handle, handles[0]):
            run_last(each.grad_fn)
        self._node: weakref.ref[Any] = weakref.ref(handle.grad_fn)
        return handles

    def note_copies(self, index: int, on_slots: Sequence[Sequence[Tensor]]) -> None:
        """Notes the `ToSlots` of a bucket, which the nodes of the bucket's copies lead to."""
        node: Any = on_slots[0][0].grad_fn
        self._sum_nodes[index] = weakref.ref(node.next_functions[0][0])

    def sum(self, index: int, node: Any, by_slot: Sequence[SlotGradients | None]) -> SourceGradients | None:
        """Sums a bucket over the slots and launches it, or keeps its gradients on the slots; see `SumsOfBucket`."""
        this_pass = self.passes.running_passes()[self]
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
        node = self._node()
        return node is not None and _torch.will_engine_execute_node(node)

    def written_sources(self) -> list[set[int]]:
        """Calls `written_sources` for each bucket, in the running backward."""
        node = self._node()
        assert node is not None
        firsts = pairwise([0, *accumulate(len(bucket.sources) for bucket in self.buckets)])
        parts = [node.next_functions[first:last] for first, last in firsts]
        return [written_sources(part, bucket.sources) for part, bucket in zip(parts, self.buckets, strict=True)]

    def refuse_to_leave_out(self, sums: ReducerSums) -> None:
        """Raises if gradients wait for a ``.grad`` that the running backward, with ``inputs=``, does not write."""
        if not sums.are_on or not sums.ids_waiting or not any(written := self.written_sources()):
            return
        for bucket, positions in zip(self.buckets, written, strict=True):
            rest = [i for i in range(len(bucket.sources)) if i not in positions]
            sums.drop_void([bucket.sources[i] for i in rest])
            for i in rest:
                if id(bucket.sources[i]) in sums.ids_waiting:
                    raise RuntimeError(
                        f"backward(inputs=...) leaves out {bucket.names[i]!r}, whose gradients wait on the slots: with "
                        "a communication hook, or over machines, only a backward that writes its .grad adds them up. "
                        "Leave out inputs=, or add the parameter to it, or zero the gradients first"
                    )

    def without_gradients(self) -> list[int]:
        """Returns the numbers of the buckets whose copies the running backward does not reach on any slot."""
        nodes = [(index, reference()) for index, reference in sorted(self._sum_nodes.items())]
        return [index for index, node in nodes if node is None or not _torch.will_engine_execute_node(node)]


class WaitForAll(Node):
    """``WaitForAll.apply(row, handle)`` returns a handle for each bucket. Backward blocks until all are reduced.

    So nobody waits before all buckets are launched, and no ``.grad`` is written before the pass has succeeded on all
    machines. The handles are on the CPU: the node runs in the thread that has called ``backward``, and may block there,
    where threads of accelerators must not. On the CPU one thread runs all nodes, this one last, so after any error of
    this machine's backward.
    """

    @staticmethod
    def forward(ctx: Any, row: BucketRow, handle: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.row, ctx.source_device = row, handle.device
        return tuple([empty_handle(CPU) for _ in row.buckets])

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[None, Tensor]:
        """Passes reduced gradients on, or those of slot 0 if gradients stay on the slots."""
        kept: list[SourceGradients | None] = [*map(take_contents, envelopes)]
        this_pass = ctx.row.passes.running_passes()[ctx.row]
        for each in _passes_of(running_pass()):
            each.launch_ready()  # before the wait: other machines may wait for another module's first
        grads = this_pass.wait_for_gradients() if this_pass.is_reduced else this_pass.on_slot_0(kept)
        return None, envelope_with(SourceGradients(grads, None, ctx.source_device), ctx.source_device)


def _passes_of(backward: PassOfBackward) -> list[OrderedPass]:
    """Returns a list for the passes of all modules in one backward."""
    return backward.get(OrderedPass, lambda _: [])


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
        """Makes each backward that begins with this output of a call begin its passes, before any error."""
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._begin_passes)

    @_torch.not_traced
    def _begin_passes(self, grad: Tensor) -> None:
        self.running_passes(_FAILED_PASS_TIMEOUT)

    def running_passes(self, patience: float = 0.0) -> dict[BucketRow, OrderedPass]:
        """Returns the passes of the running backward over each row, which begin now if no output has noticed it.

        The backward may not be nested in another one. One that has failed may still be in a thread of the engine: this
        waits ``patience`` seconds for its end.
        """
        backward = running_pass()
        with self._changed:
            if not wait_for_passes(
                self._changed,
                lambda: not self._backward_passes or self in backward.contents,  # begun by another thread meanwhile
                patience,
            ):
                raise RuntimeError(
                    "a backward has reached the parameters of a module, whose sums go on to other machines or to a "
                    "hook, while another backward of the module is under way. If a checkpoint inside it nests them, "
                    "pass use_reentrant=False to it; if two threads run them, run one after the other"
                )
            return backward.get(self, self._make_passes)

    def _make_passes(self, backward: PassOfBackward) -> dict[BucketRow, OrderedPass]:
        previous: OrderedPass | None = None
        passes: dict[BucketRow, OrderedPass] = {}
        rows = [row for row in self.rows if row.is_reached()]  # the oldest first
        for row in rows:
            row.refuse_to_leave_out(self.sums)
        for row in rows:
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


class _Bucket(NamedTuple):
    """A bucket that is to be launched, or was launched and not waited for."""

    flat: Tensor
    used: list[bool]  # for each parameter, whether it has a gradient here
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
        self._lock = threading.Lock()
        self._written = row.written_sources()
        self._kept_gradients = row.passes.sums
        self.is_reduced = self._kept_gradients.are_on or not any(self._written)
        self._without_gradients = row.without_gradients()
        self._reducer_pass = row.passes.reducer.begin_pass(row.contents) if self.is_reduced else None
        self._ready: dict[int, _Bucket] = {}  # by its number: a bucket that waits for its turn
        self._in_flight: list[_Bucket] = []
        self._taken: list[WaitingGradients] = []
        self._end_result: AsyncResult | None = None
        self._is_over = threading.Event()  # set when the end was sent, or the pass has failed
        self._waits_for_reducer = False  # also after it has raised: then the reducer knows of the failure

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
        # The thread that called ``backward`` may already wait for another module. On the CPU it runs all nodes.
        self.launch_ready(may_end=node.source_device != CPU)

    def _make_ready(self, node: Any, index: int, by_slot: Sequence[SlotGradients | None]) -> None:
        bucket = self._row.buckets[index]
        taken = self._kept_gradients.take(bucket, self._written[index])
        if taken:
            self._taken += taken
            by_slot = bucket.with_kept_gradients(node, by_slot, taken)
        sums, streams = ToSlots.sum_over_slots(node, by_slot), node.gradient_streams
        grads = [None] * len(bucket.names) if sums is None else sums.grads_on_side_streams
        with ToSlots.adding_streams_set(node):
            flat = bucket.flat_of(sums)
            if streams is not None and (sums is None or flat is not sums.flat):
                flat.record_stream(streams.computing[node.source_device])  # allocated on a side stream
        used = [grad is not None for grad in grads]
        self._ready[index] = _Bucket(flat, used, sums, {} if streams is None else dict(streams.sides))

    def launch_ready(self, may_end: bool = True) -> None:
        """Launches the buckets whose turn it is, after those of the previous pass. Ends the pass after the last one."""
        if self._previous is not None and not self._previous._is_over.is_set():
            return
        with self._lock:
            if self._is_over.is_set() or self._reducer_pass is None:
                return
            while (ready := self._ready.pop(len(self._in_flight), None)) is not None:
                self._launch(ready)
            if may_end and len(self._in_flight) == len(self._row.buckets):
                used = [*chain.from_iterable(bucket.used for bucket in self._in_flight)]
                self._end_result = self._reducer_pass.end_pass(used, self._row.order.proposal())
                self._is_over.set()

    def _launch(self, bucket: _Bucket) -> None:
        assert self._reducer_pass is not None
        with streams_set(bucket.sides):
            result = self._reducer_pass.launch(self._summed(len(self._in_flight), bucket.flat))
            launch_event = Event(bucket.sides[bucket.flat.device]) if bucket.sides else None
        self._in_flight.append(bucket._replace(result=result, launch_event=launch_event))

    def _summed(self, index: int, flat: Tensor) -> GradBucket:
        bucket, count = self._row.buckets[index], len(self._row.buckets)
        parameters = [bucket.sources[i] for i in bucket.layout.indices]
        return GradBucket(index, count, flat, parameters, [bucket.names[i] for i in bucket.layout.indices])

    def wait_for_gradients(self) -> list[Tensor | None]:
        """Blocks until all buckets are reduced. Returns the gradients; ``None`` for what no machine has used.

        The computing streams are ordered after them.
        """
        if self._previous is not None and not self._previous._is_over.wait(_PREVIOUS_PASS_TIMEOUT):
            raise RuntimeError(
                f"after {_PREVIOUS_PASS_TIMEOUT:g} s the gradients of an earlier forward of this backward have not "
                "been launched: an error has ended their part of it"
            )
        self.launch_ready()
        # `launch_event` orders the computing stream after the launch. The memory of the sums is held until then.
        grads: list[Tensor | None] = []
        streams, self._waits_for_reducer = self._row.streams, True
        with streams_set(streams):
            for of_bucket in self._row.buckets:
                bucket = self._in_flight[0]
                if bucket.launch_event is not None:
                    bucket.launch_event.make_wait(streams[bucket.flat.device])
                assert bucket.result is not None
                grads += of_bucket.unflatten(bucket.result.wait())
                if bucket.sums is not None:
                    bucket.sums.take()
                del self._in_flight[0], bucket
        assert self._end_result is not None
        used_anywhere, order = self._end_result.wait()
        self._waits_for_reducer = False
        with streams_set(streams):
            taken, self._taken = self._taken, []
            self._kept_gradients.remove_from_grads(taken)
            del taken
        self._row.order.agree(order)
        return [grad if used else None for grad, used in zip(grads, used_anywhere, strict=True)]

    def on_slot_0(self, kept: Sequence[SourceGradients | None]) -> list[Tensor | None]:
        """Slot 0's gradients, which `keep_on_slots` has returned for each bucket that the pass reaches."""
        pairs = zip(kept, self._row.buckets, strict=True)
        return [*chain.from_iterable([None] * len(bucket.names) if g is None else g.take() for g, bucket in pairs)]

    # ---- when backward has failed ------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Backward has failed here: tells the other machines, and puts kept gradients back.

        It may fail after the sums, in a parameter's hook: the others have the gradients then, and this one has not.
        """
        try:
            if self._reducer_pass is not None and not self._waits_for_reducer:
                count = len(self._row.buckets)
                missing = range(count if self._is_over.is_set() else len(self._in_flight), count)
                self._is_over.set()
                self._reducer_pass.fail(error, (self._summed(i, self._row.buckets[i].zeros()) for i in missing))
        finally:
            self._kept_gradients.put_back(self._taken)
            self._taken.clear()
            self._in_flight.clear()
