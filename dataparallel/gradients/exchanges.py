"""One pass over the buckets of copies that were made together, whose sums go on after the slots (``after_slots``).

All machines launch the same buckets in the same order, and end the pass, whatever happens: if it fails here, the
buckets that are missing go on with zeros, and the others hear of the failure. The nodes in ``exchange_nodes`` call it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.bucket_gradients import SlotGradients, SourceGradients
from dataparallel.autograd.bucket_nodes import ToSlots
from dataparallel.comm.buckets import unflatten
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.gradients.after_slots import Arriving, Backward, BucketSum, ChainedBucket
from dataparallel.gradients.exchanged_sums import Taken
from dataparallel.gradients.gradient_sums import reached_sources

if TYPE_CHECKING:
    from dataparallel.gradients.exchange_nodes import Passes

_numbers = count()

_OLDER = 300.0
"""Seconds that a chain waits for an older one of the same pass. Only an error keeps that from being launched."""


class Chain:
    """The buckets of copies that were made together. The nodes of their graph hold it.

    Args:
        passes: the passes of the module.
        buckets: in their order.
        streams: the computing streams of the forward.
        when_arrived: called when a pass has succeeded on all machines.

    Attributes:
        number: chains that were made later have higher ones.
        contents: what all machines have to agree on.
        firsts: the position of each bucket's first parameter among all, and their number.
        end: the node after the last bucket, as soon as there is one.
    """

    def __init__(
        self,
        passes: Passes,
        buckets: Sequence[ChainedBucket],
        streams: dict[torch.device, torch.Stream],
        when_arrived: Callable[[], None],
    ) -> None:
        self.passes, self.buckets, self.streams, self.when_arrived = passes, list(buckets), streams, when_arrived
        self.number = next(_numbers)
        self.contents = "\n".join(f"{i}: {bucket.describe()}" for i, bucket in enumerate(buckets))
        self.firsts = [0, *accumulate(len(bucket.names) for bucket in self.buckets)]
        self.end: weakref.ref[Any] | None = None
        self._on_slots: list[list[weakref.ref[Any]]] = [[] for _ in self.buckets]

    def note_copies(self, index: int, on_slots: Sequence[Sequence[Tensor]]) -> None:
        """Notes a bucket's copies on the slots, to ask the engine which of them a pass reaches."""
        self._on_slots[index] = [weakref.ref(copies[0].grad_fn) for copies in on_slots]

    def is_reached(self) -> bool:
        """True if the running pass goes over this chain."""
        end = None if self.end is None else self.end()
        return end is not None and _torch.will_engine_execute_node(end)

    def reached(self) -> list[tuple[bool, set[int]]]:
        """`reached_sources` of each bucket, in the running pass."""
        end = None if self.end is None else self.end()
        assert end is not None
        ((all_arrived, _),) = [following for following in end.next_functions if following[0] is not None]
        nodes = [node for node, _ in all_arrived.next_functions if node is not None]
        return [reached_sources(node, bucket.waiting.sources) for node, bucket in zip(nodes, self.buckets, strict=True)]

    def has_gradients(self) -> list[bool]:
        """For each bucket: if the running pass reaches its copies on a slot."""
        return [
            any(_torch.will_engine_execute_node(node) for found in of_bucket if (node := found()) is not None)
            for of_bucket in self._on_slots
        ]


class _Launched(NamedTuple):
    """A bucket that is under way."""

    arriving: Arriving | None
    flat: Tensor
    sums: SourceGradients | None  # holds the memory of ``flat``
    made: Event | None  # after the last work on ``flat`` before it was launched, if computing streams have to wait


class Exchange:
    """One pass over one chain. In each thread of the engine one node at a time uses it.

    Attributes:
        is_on: if true, sums are launched, else the slots keep the gradients.
    """

    def __init__(self, chain: Chain, before: Exchange | None) -> None:
        self.chain = chain
        self._before, self._after = before, None
        if before is not None:
            before._after = self
        sums = chain.buckets[0].waiting.sums
        self._reached = chain.reached()
        self._has_gradients = chain.has_gradients()
        self.is_on = sums.are_on or not any(written for _, written in self._reached)
        self._lock = threading.RLock()
        self._todo: list[Callable[[], None]] = []  # while an older chain of this pass has not ended
        self._count = 0  # buckets that have been brought
        self._backward: Backward | None = None
        self._launched: list[_Launched] = []
        self._used: list[bool] = []
        self._taken: list[Taken] = []
        self._ended: Arriving | None = None
        self._is_over = self._is_ended = False  # `end` was called; the end was sent, in turn
        self._is_sent = threading.Event()
        self._arrived: list[Tensor | None] = []
        self._used_anywhere: Sequence[bool] = ()

    # ---- in the nodes ------------------------------------------------------------------------------------------------

    def keep(self, index: int, by_slot: Sequence[SlotGradients | None]) -> list[Tensor | None] | None:
        """Keeps a bucket's gradients on the slots; see `ExchangedBucket.keep`."""
        reached, written = self._reached[index]
        if not reached:
            return None
        waiting = self.chain.buckets[index].waiting
        if not waiting.has_leaves_only:
            raise RuntimeError(
                "gradients cannot stay on the slots here: a buffer of the module is the result of a computation, and "
                "its gradient goes on into that graph. Leave out no_sync, or detach the buffer"
            )
        return waiting.keep(by_slot, written)

    def bring(self, ctx: Any, index: int, by_slot: Sequence[SlotGradients | None]) -> None:
        """Launches a bucket, and those around it that this pass does not reach.

        On an accelerator the thread that launches the last bucket also ends the row: the thread that called
        ``backward`` may already block in `wait` of another module.
        """
        if index < self._count:  # it was launched with the bucket before it
            return
        nothing = [None] * len(by_slot)
        while self._count < index:
            self._bring_next(ctx, nothing)
        self._bring_next(ctx, by_slot)
        while self._count < len(self.chain.buckets) and not self._has_gradients[self._count]:
            self._bring_next(ctx, nothing)
        if self._count == len(self.chain.buckets) and ctx.source.type != "cpu":
            self.end()

    def _bring_next(self, ctx: Any, by_slot: Sequence[SlotGradients | None]) -> None:
        bucket = self.chain.buckets[self._count]
        taken = bucket.waiting.take(self._reached[self._count][1])
        if taken.kept:
            self._taken.append(taken)
            with ToSlots.adding_streams_set(ctx):
                by_slot = bucket.waiting.added(by_slot, taken.kept)
        sums = ToSlots.total(ctx, by_slot)
        grads = [None] * len(bucket.names) if sums is None else sums.on_side_streams
        self._used += [grad is not None for grad in grads]
        streams = ctx.gradient_streams
        sides = {} if streams is None else dict(streams.sides)
        computing = None if streams is None else streams.computing[ctx.source]
        with ToSlots.adding_streams_set(ctx):
            if sums is not None and sums.flat is not None and bucket.fits(sums):
                flat = sums.flat
            else:
                flat = bucket.zeros() if sums is None else bucket.packed(grads)
                if computing is not None:  # made on a side stream, used on the computing stream
                    flat.record_stream(computing)
        self._launch(self._count, flat, sums, sides)
        self._count += 1

    def _launch(
        self, index: int, flat: Tensor, sums: SourceGradients | None, sides: dict[torch.device, torch.Stream]
    ) -> None:
        """Launches a bucket with ``sides`` current, now or when the older chains of this pass have ended."""
        bucket = self.chain.buckets[index]
        members = bucket.layout.indices
        launched = BucketSum(
            index,
            len(self.chain.buckets),
            flat,
            bucket.layout,
            [bucket.waiting.sources[i] for i in members],
            [bucket.names[i] for i in members],
        )

        def launch() -> None:
            if self._backward is None:
                self._backward = self.chain.passes.after.begin(self.chain.contents)
            with streams_set(sides):
                arriving = self._backward.launch(launched)
                made = Event(sides[flat.device]) if sides else None
            self._launched.append(_Launched(arriving, flat, sums, made))

        self._in_turn(launch)

    def end(self) -> None:
        """Ends what is launched, once."""
        if self._is_over:
            return
        self._is_over = True
        if self.is_on:
            self._in_turn(self._send_end)
        self._pass_on()

    def _send_end(self, error: BaseException | None = None) -> None:
        assert self._backward is not None
        self._is_ended = True
        self._ended = self._backward.end(self._used, error)
        self._is_sent.set()

    def _in_turn(self, do: Callable[[], None]) -> None:
        with self._lock:
            if self._before is not None:
                self._todo.append(do)
                return
        do()

    def _pass_on(self) -> None:
        """The next chain of this pass has its turn."""
        after = self._after
        if after is not None and self._before is None:
            with after._lock:
                after._before = None
                todo, after._todo = after._todo, []
                for do in todo:
                    do()
            if after._is_ended or not after.is_on:
                after._pass_on()

    def wait(self) -> None:
        """Blocks until everything has arrived; the computing streams are ordered after it."""
        if not self.is_on:
            return
        if not self._is_sent.wait(_OLDER):  # only in a pass over several chains, in the threads of devices
            raise RuntimeError(
                f"after {_OLDER:g} s the gradients of an earlier forward of this backward have not been launched: "
                "an error has ended their part of it"
            )
        # The event behind a launch orders what arrives on the computing stream. Sums are held until then.
        with streams_set(self.chain.streams):
            while self._launched:
                arriving, flat, sums, made = self._launched[0]
                if made is not None:
                    made.make_wait(self.chain.streams[flat.device])
                assert arriving is not None
                self._arrived.append(arriving.wait())
                if sums is not None:
                    sums.take()
                del self._launched[0], arriving, flat, sums
        assert self._ended is not None
        self._used_anywhere = self._ended.wait()
        self._taken.clear()
        self.chain.when_arrived()

    def take(self, index: int) -> list[Tensor | None]:
        """The gradients of a bucket; ``None`` for those that no machine has used."""
        bucket, first = self.chain.buckets[index], self.chain.firsts[index]
        grads: list[Tensor | None] = [None] * len(bucket.names)
        layout, flat = bucket.layout, self._arrived[index]
        self._arrived[index] = None
        assert flat is not None
        for i, grad in zip(layout.indices, unflatten(layout, flat), strict=True):
            if self._used_anywhere[first + i]:
                grads[i] = grad
        return grads

    # ---- when the pass has failed ------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """The pass has failed here: sends what the other machines wait for, and gives back what was taken."""
        try:
            if self.is_on and not self._is_ended:
                self._fail(error)
        finally:
            for taken in self._taken:
                taken.put_back()
            self._taken.clear()
            self._launched.clear()
            self._is_sent.set()
            self._pass_on()

    def _fail(self, error: BaseException) -> None:
        self._todo.clear()
        if self._backward is None:
            self._is_ended = True
            self.chain.passes.after.signal_failure(error)
            return
        self._used = [False] * self.chain.firsts[-1]
        for index in range(len(self._launched), len(self.chain.buckets)):
            self._launch(index, self.chain.buckets[index].zeros(), None, {})
        self._send_end(error)
