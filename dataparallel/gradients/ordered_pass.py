"""One pass of backward over buckets whose sums go on after the slots, and the `Reducer` that they go to.

All machines launch the same buckets in the same order, and end the pass, whatever happens: if it fails here, the
buckets that are missing go on with zeros, and the others hear of the failure. ``ordered_nodes`` has the graph's nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dataparallel.autograd.bucket_gradients import SlotGradients, SourceGradients
from dataparallel.autograd.bucket_nodes import ToSlots
from dataparallel.comm.buckets import Bucket, unflatten
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.gradients.reducer_buckets import Taken

if TYPE_CHECKING:
    from dataparallel.gradients.ordered_nodes import OrderedBuckets

_OLDER = 300.0
"""Seconds that buckets wait for older ones of the same pass. Only an error keeps those from being launched."""


@dataclass(frozen=True, slots=True)
class BucketSum:
    """The sum over the slots of one bucket. A parameter that no slot has used has zeros in it.

    Attributes:
        index, count: the number of the bucket, from 0 on, and how many buckets every pass has.
        flat: one gradient after the other, each in the order of a contiguous tensor. It is not divided by anything, and
            belongs to whoever gets it.
        layout: where each gradient lies in ``flat``.
        parameters: their parameters, in the order of ``flat``.
        names: the names of the parameters.
    """

    index: int
    count: int
    flat: Tensor
    layout: Bucket
    parameters: Sequence[Tensor]
    names: Sequence[str]


class Arriving(Protocol):
    """Something that is under way."""

    def wait(self) -> Any:
        """Blocks the host until it is there, or has failed.

        Of a bucket: a flat tensor like the one that was launched, or that one, ordered on the current stream of its
        device. Of the end of a pass: for each parameter, in the order of all buckets, True if some machine has used it.
        """


class ReducerPass(Protocol):
    """One pass of a `Reducer`."""

    def launch(self, sums: BucketSum) -> Arriving | None:
        """Takes a bucket further, and returns at once if it can. Called in the order of buckets, in any thread.

        ``None``: this has failed before in this pass, so nobody waits.
        """

    def end_pass(self, used: Sequence[bool], error: BaseException | None = None) -> Arriving:
        """Called after the last bucket. ``used``: the parameters of all buckets that have a gradient here.

        ``error``: the pass has failed here. Buckets that were missing have been launched with zeros, and nobody waits.
        """


class Reducer(Protocol):
    """Takes the sums of one module further. It lives as long as the module, and other objects can take its place."""

    def begin_pass(self, contents: str) -> ReducerPass:
        """``contents`` says which parameters are in which bucket, and is equal on all machines."""

    def signal_failure(self, error: BaseException) -> None:
        """A pass has failed here before it began, so the others would wait for it. A recorded forward has, too."""


class _Launched(NamedTuple):
    """A bucket that is under way."""

    arriving: Arriving | None
    flat: Tensor
    sums: SourceGradients | None  # holds the memory of ``flat``
    made: Event | None  # after the last work on ``flat`` before it was launched, if computing streams have to wait


class OrderedPass:
    """One pass over the buckets of one forward. In each thread of the engine one node at a time uses it.

    Attributes:
        is_on: if true, sums are launched, else the slots keep the gradients.
    """

    def __init__(self, ordered: OrderedBuckets, before: OrderedPass | None) -> None:
        self._ordered = ordered
        self._before, self._after = before, None
        if before is not None:
            before._after = self
        self._reached = ordered.reached()
        self._has_gradients = ordered.has_gradients()
        self._sums = ordered.passes.sums
        self.is_on = self._sums.are_on or not any(written for _, written in self._reached)
        self._lock = threading.RLock()
        self._todo: list[Callable[[], None]] = []  # while older buckets of this pass are not all launched
        self._count = 0  # buckets that nodes have launched
        self._reducer_pass: ReducerPass | None = None
        self._launched: list[_Launched] = []
        self._used: list[bool] = []
        self._taken: list[Taken] = []
        self._ended: Arriving | None = None
        self._is_over = self._is_ended = False  # `end_launches` was called; the end was sent, in turn
        self._is_sent = threading.Event()
        self._arrived: list[Tensor | None] = []
        self._used_anywhere: Sequence[bool] = ()

    # ---- in the nodes ------------------------------------------------------------------------------------------------

    def keep_on_slots(self, index: int, by_slot: Sequence[SlotGradients | None]) -> list[Tensor | None] | None:
        """Keeps a bucket's gradients on the slots; see `GradientSums.keep`."""
        reached, written = self._reached[index]
        if not reached:
            return None
        bucket = self._ordered.buckets[index]
        if not bucket.has_leaves_only:
            raise RuntimeError(
                "gradients cannot stay on the slots here: a buffer of the module is the result of a computation, and "
                "its gradient goes on into that graph. Leave out no_sync, or detach the buffer"
            )
        return self._sums.keep(bucket, by_slot, written)

    def launch_bucket(self, ctx: Any, index: int, by_slot: Sequence[SlotGradients | None]) -> None:
        """Launches a bucket, and those around it that this pass does not reach.

        On an accelerator the thread that launches the last bucket also ends the launches: the thread that called
        ``backward`` may already block in `wait_for_all` of another module.
        """
        if index < self._count:  # it was launched with the bucket before it
            return
        nothing = [None] * len(by_slot)
        while self._count < index:
            self._launch_next(ctx, nothing)
        self._launch_next(ctx, by_slot)
        while self._count < len(self._ordered.buckets) and not self._has_gradients[self._count]:
            self._launch_next(ctx, nothing)
        if self._count == len(self._ordered.buckets) and ctx.source_device.type != "cpu":
            self.end_launches()

    def _launch_next(self, ctx: Any, by_slot: Sequence[SlotGradients | None]) -> None:
        bucket = self._ordered.buckets[self._count]
        taken = self._sums.take_to_send(bucket, self._reached[self._count][1])
        if taken.kept:
            self._taken.append(taken)
            with ToSlots.adding_streams_set(ctx):
                by_slot = bucket.added(by_slot, taken.kept)
        sums = ToSlots.sum_over_slots(ctx, by_slot)
        grads = [None] * len(bucket.names) if sums is None else sums.grads_on_side_streams
        self._used += [grad is not None for grad in grads]
        streams = ctx.gradient_streams
        sides = {} if streams is None else dict(streams.sides)
        with ToSlots.adding_streams_set(ctx):
            if sums is not None and sums.flat is not None and bucket.fits(sums):
                flat = sums.flat
            else:
                flat = bucket.zeros() if sums is None else bucket.packed(grads)
                if streams is not None:  # made on a side stream, used on the computing stream
                    flat.record_stream(streams.computing[ctx.source_device])
        self._launch(self._count, flat, sums, sides)
        self._count += 1

    def _launch(
        self, index: int, flat: Tensor, sums: SourceGradients | None, sides: dict[torch.device, torch.Stream]
    ) -> None:
        """Launches a bucket with ``sides`` current, now or when the older buckets of this pass are launched."""
        ordered, bucket = self._ordered, self._ordered.buckets[index]
        members = bucket.layout.indices
        parameters, names = [bucket.sources[i] for i in members], [bucket.names[i] for i in members]
        bucket_sum = BucketSum(index, len(ordered.buckets), flat, bucket.layout, parameters, names)

        def launch() -> None:
            if self._reducer_pass is None:
                self._reducer_pass = ordered.passes.reducer.begin_pass(ordered.contents)
            with streams_set(sides):
                arriving = self._reducer_pass.launch(bucket_sum)
                made = Event(sides[flat.device]) if sides else None
            self._launched.append(_Launched(arriving, flat, sums, made))

        self._in_turn(launch)

    def end_launches(self) -> None:
        """Says that all is launched, once."""
        if self._is_over:
            return
        self._is_over = True
        if self.is_on:
            self._in_turn(self._send_end)
        self._pass_on()

    def _send_end(self, error: BaseException | None = None) -> None:
        assert self._reducer_pass is not None
        self._is_ended = True
        self._ended = self._reducer_pass.end_pass(self._used, error)
        self._is_sent.set()

    def _in_turn(self, do: Callable[[], None]) -> None:
        with self._lock:
            if self._before is not None:
                self._todo.append(do)
                return
        do()

    def _pass_on(self) -> None:
        """The buckets that were made next and are part of this pass have their turn."""
        after = self._after
        if after is not None and self._before is None:
            with after._lock:
                after._before = None
                todo, after._todo = after._todo, []
                for do in todo:
                    do()
            if after._is_ended or not after.is_on:
                after._pass_on()

    def wait_for_all(self) -> None:
        """Blocks until everything has arrived; the computing streams are ordered after it."""
        if not self.is_on:
            return
        if not self._is_sent.wait(_OLDER):  # only in a pass over several forwards, in the threads of devices
            raise RuntimeError(
                f"after {_OLDER:g} s the gradients of an earlier forward of this backward have not been launched: "
                "an error has ended their part of it"
            )
        # The event behind a launch orders what arrives on the computing stream. Sums are held until then.
        streams = self._ordered.streams
        with streams_set(streams):
            while self._launched:
                arriving, flat, sums, made = self._launched[0]
                if made is not None:
                    made.make_wait(streams[flat.device])
                assert arriving is not None
                self._arrived.append(arriving.wait())
                if sums is not None:
                    sums.take()
                del self._launched[0], arriving, flat, sums
        assert self._ended is not None
        self._used_anywhere = self._ended.wait()
        self._taken.clear()
        self._ordered.when_arrived()

    def take_gradients(self, index: int) -> list[Tensor | None]:
        """The gradients of a bucket; ``None`` for those that no machine has used."""
        bucket, first = self._ordered.buckets[index], self._ordered.firsts[index]
        grads: list[Tensor | None] = [None] * len(bucket.names)
        flat, self._arrived[index] = self._arrived[index], None
        assert flat is not None
        for i, grad in zip(bucket.layout.indices, unflatten(bucket.layout, flat), strict=True):
            if self._used_anywhere[first + i]:
                grads[i] = grad
        return grads

    # ---- when the pass has failed ------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """The pass has failed here: sends what the other machines wait for, and gives back what was taken."""
        try:
            if self.is_on and not self._is_ended:
                self._send_failure(error)
        finally:
            for taken in self._taken:
                self._sums.put_back(taken)
            self._taken.clear()
            self._launched.clear()
            self._is_sent.set()
            self._pass_on()

    def _send_failure(self, error: BaseException) -> None:
        self._todo.clear()
        if self._reducer_pass is None:
            self._is_ended = True
            self._ordered.passes.reducer.signal_failure(error)
            return
        self._used = [False] * self._ordered.firsts[-1]
        for index in range(len(self._launched), len(self._ordered.buckets)):
            self._launch(index, self._ordered.buckets[index].zeros(), None, {})
        self._send_end(error)
