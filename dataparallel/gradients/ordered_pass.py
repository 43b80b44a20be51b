"""`OrderedPass` launches the summed buckets of one backward in a fixed order, each as a call of a `Reducer`.

All machines launch the same buckets in the same order and end the pass, even if backward fails on one of them: that
machine launches its missing buckets with zeros and tells the others of the failure. ``ordered_nodes`` has the nodes.
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
from dataparallel.comm.buckets import unflatten
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.gradients.reducer_buckets import TakenGradients

if TYPE_CHECKING:
    from dataparallel.gradients.ordered_nodes import BucketRow

_PREVIOUS_PASS_TIMEOUT = 300.0
"""Seconds that a pass waits for the pass before it in the same backward. Only an error makes the wait that long."""


@dataclass(frozen=True, slots=True)
class BucketSum:
    """The sum over the slots of one bucket. A parameter that no slot has used has zeros in it.

    Attributes:
        index, count: the number of the bucket, from 0 on, and how many buckets every pass has.
        flat: one gradient after the other, each in the order of a contiguous tensor. It is not divided by anything, and
            the reducer may write to it and keep it.
        parameters: the gradients' parameters, in the order of ``flat``.
        names: the names of the parameters.
    """

    index: int
    count: int
    flat: Tensor
    parameters: Sequence[Tensor]
    names: Sequence[str]


class AsyncResult(Protocol):
    """The result of work that a reducer has begun."""

    def wait(self) -> Any:
        """Blocks the host until the work is done, and returns its result or raises its error.

        After `ReducerPass.launch` the result is the reduced flat tensor, the launched one or one like it, ordered on
        the current stream. After `ReducerPass.end_pass`: for each parameter, True if some machine has used it.
        """


class ReducerPass(Protocol):
    """One pass of a `Reducer`."""

    def launch(self, bucket_sum: BucketSum) -> AsyncResult | None:
        """Begins to reduce a bucket. Called in the order of buckets, in any thread, which it does not block if it can.

        Returns ``None`` if an earlier launch of this pass has raised: then nobody waits.
        """

    def end_pass(self, used: Sequence[bool], error: BaseException | None = None) -> AsyncResult:
        """Called after the last bucket. ``used`` says for each parameter of all buckets if it has a gradient here.

        With ``error`` the pass has failed here: missing buckets were launched with zeros, and nobody waits.
        """


class Reducer(Protocol):
    """Reduces the summed gradients of one module further. Another reducer can take its place between steps."""

    def begin_pass(self, contents: str) -> ReducerPass:
        """Begins a pass. ``contents`` says which parameters are in which bucket, and is equal on all machines."""

    def signal_failure(self, error: BaseException) -> None:
        """Tells the other machines, which would wait, that a pass or a recorded forward has failed before it began."""


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
        self._reducer_pass: ReducerPass | None = None
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
        bucket_sum = BucketSum(index, len(row.buckets), flat, parameters, names)

        def launch() -> None:
            if self._reducer_pass is None:
                self._reducer_pass = row.passes.reducer.begin_pass(row.contents)
            with streams_set(sides):
                result = self._reducer_pass.launch(bucket_sum)
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

    def _send_end(self, error: BaseException | None = None) -> None:
        assert self._reducer_pass is not None
        self._is_end_sent = True
        self._end_result = self._reducer_pass.end_pass(self._used_here, error)
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
        self._used_anywhere = self._end_result.wait()
        with streams_set(self._row.streams):
            while self._taken:
                self._kept_gradients.remove_from_grads(self._taken.pop())
        self._row.on_success()

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
        """Backward has failed here: sends what the other machines wait for, and puts kept gradients back."""
        try:
            if self.is_reduced and not self._is_end_sent:
                self._send_failure(error)
        finally:
            for taken in self._taken:
                self._kept_gradients.put_back(taken)
            self._taken.clear()
            self._in_flight.clear()
            self._may_wait.set()
            self._release_next_pass()

    def _send_failure(self, error: BaseException) -> None:
        self._postponed.clear()
        if self._reducer_pass is None:
            self._is_end_sent = True
            self._row.passes.reducer.signal_failure(error)
            return
        self._used_here = [False] * self._row.first_positions[-1]
        for index in range(len(self._in_flight), len(self._row.buckets)):
            self._launch(index, self._row.buckets[index].zeros(), None, {})
        self._send_end(error)
