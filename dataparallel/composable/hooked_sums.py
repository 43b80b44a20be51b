"""A communication hook after the slots: it gets the sum of each bucket, and what it leaves are the gradients.

`HookedSums` is an `AfterSlots` without machines. The hook runs in the thread of the backward pass, as soon as a bucket
is summed, and its future is waited for when the pass has launched everything. What it sends is its own affair. Hooks of
two buckets never run at the same time: a hook may send more when a first collective is done (PowerSGD does), and all
ranks have to send the same things in the same order. So the hook of a bucket is called when the future of the bucket
before is done.

Streams: on an accelerator all calls of the hook run on one stream, which first waits for the stream that has made the
sum. So a hook may use the tensors of an earlier call. Callbacks of a future that is done later run on the default
stream of their thread. Whoever takes the gradients waits for both streams.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dataparallel._torch import current_stream_at
from dataparallel.composable.after_slots import BucketSum
from dataparallel.composable.comm_hooks import CommHook, GradBucket, wait_for
from dataparallel.devices import current_device_set
from dataparallel.streams.current import Event, kept_stream, streams_set
from dataparallel.streams.nodes import memory_of

__all__ = ["Called", "HookedSums"]


class HookedSums:
    """The `AfterSlots` of a hook."""

    def __init__(self, hook: CommHook) -> None:
        self.hook = hook
        self._lock = threading.Lock()  # several threads may have a pass each
        self._under_way: Any = None

    def begin(self, contents: str) -> _Pass:
        """See `AfterSlots`."""
        return _Pass(self)

    def signal_failure(self, error: BaseException) -> None:
        """See `AfterSlots`. No other process is known."""

    def call(self, bucket: GradBucket) -> Called:
        """Calls the hook, once the call for the bucket before it is done.

        Raises:
            Exception: as `CommHook.begin`.
        """
        with self._lock:
            former, self._under_way = self._under_way, None
            if former is not None:
                wait_for(former)
            called = Called(self.hook, bucket)
            if not called.future.done():
                self._under_way = called.future
        return called


class _Pass:
    """A `Backward`."""

    def __init__(self, sums: HookedSums) -> None:
        self._sums = sums
        self._has_failed = False

    def launch(self, sums: BucketSum) -> Called | None:
        """See `Backward`. If the pass fails elsewhere, the hook is still called for the other buckets, with zeros.

        After a failure of its own it is not called again, and nobody waits for what this returns.

        Raises:
            Exception: as `CommHook.begin`.
        """
        if self._has_failed:
            return None
        self._has_failed = True
        called = self._sums.call(GradBucket(sums.index, sums.count, sums.flat, sums.parameters, sums.names))
        self._has_failed = False
        return called

    def end(self, used: Sequence[bool], error: BaseException | None = None) -> _There:
        """See `Backward`. Only this process is known, so a gradient is ``None`` if no slot has used the parameter."""
        return _There(used)


class _There:
    """What is known at once. Who waits for the end of a pass has waited for its buckets before."""

    def __init__(self, value: Sequence[bool]) -> None:
        self._value = value

    def wait(self) -> Sequence[bool]:
        return self._value


class Called:
    """A call of the hook. Made with the streams current that have made the bucket's sum, or with an event behind it.

    Attributes:
        future: what the hook has returned.
    """

    def __init__(self, hook: CommHook, bucket: GradBucket, summed: Event | None = None) -> None:
        self._hook, self._bucket = hook, bucket
        self._device = bucket.buffer().device
        self._stream = None if self._device.type == "cpu" else kept_stream(self._device, "hooks")
        with self._stream_set(bucket.buffer(), summed):
            self.future = hook.begin(bucket)
        self._was_done = self.future.done()
        self._event = None if self._stream is None else Event(self._stream)

    def check(self) -> None:
        """Raises as `CommHook.value`. The future has to be done."""
        self._hook.value(self._bucket, self.future)

    def wait(self) -> Tensor:
        """The gradients, on the current stream.

        Raises:
            Exception: as `CommHook.value`.
        """
        wait_for(self.future)
        if self._event is None:
            return self._bucket.owned(self._hook.value(self._bucket, self.future))
        here = current_stream_at(self._device.index)
        self._event.make_wait(here)
        if not self._was_done:
            Event(torch.get_device_module(self._device).default_stream(self._device)).make_wait(here)
        value = self._hook.value(self._bucket, self.future)
        for memory in memory_of(value):  # it may have been allocated on another stream
            memory.record_stream(here)
        return self._bucket.owned(value)

    @contextmanager
    def _stream_set(self, flat: Tensor, summed: Event | None) -> Iterator[None]:
        """Inside, the stream and the device of hooks are current. The stream is behind what has made ``flat``."""
        if self._stream is None:
            yield
            return
        (summed or Event(current_stream_at(self._device.index))).make_wait(self._stream)
        # If the pass fails, nobody's stream waits for this one before the memory is used again.
        flat.record_stream(self._stream)
        with current_device_set(self._device), streams_set({self._device: self._stream}):
            yield
