"""`CommHook` calls a user's communication hook, which turns a bucket's sum over the slots into the bucket's gradients.

The interface is that of ``torch.nn.parallel.DistributedDataParallel``: ``hook(state, bucket)`` returns a
``torch.futures.Future`` of a tensor. `HookedSums` is the `Reducer` that calls a hook where there are no machines.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from dataparallel._torch import current_stream_at
from dataparallel.arguments import checked
from dataparallel.comm.streams.current import Event, kept_stream, memory_of, streams_set
from dataparallel.devices import current_device_set

log = logging.getLogger("dataparallel")


class GradBucket:
    """A bucket of gradients, for a `Reducer` or a communication hook, with the methods of torch's class of this name.

    The buffer has the sum over the slots of this process, one gradient after the other in the order of `parameters`,
    each in the order of a contiguous tensor. It is not divided by anything. A parameter that no slot has used has
    zeros there. The hook may write to the buffer.
    """

    def __init__(
        self, index: int, count: int, buffer: Tensor, parameters: Sequence[Tensor], names: Sequence[str]
    ) -> None:
        self._index, self.count, self._parameters, self.names = index, count, parameters, names
        self._buffer = buffer
        self.summed: Tensor = buffer
        """The buffer that the bucket was made with; `set_buffer` does not change it."""
        self.kind: tuple[torch.Size, torch.dtype, torch.device] = (buffer.shape, buffer.dtype, buffer.device)

    def over(self, buffer: Tensor) -> GradBucket:
        """The same bucket with a copy of the buffer."""
        return GradBucket(self._index, self.count, buffer, self._parameters, self.names)

    def index(self) -> int:
        """The bucket's number, from 0 on. Hooks are called in this order, once for each bucket in each backward."""
        return self._index

    def is_last(self) -> bool:
        """True for the last bucket of a backward."""
        return self._index == self.count - 1

    def buffer(self) -> Tensor:
        """All gradients in one flat tensor: the one that `set_buffer` was given last, else the sum over the slots."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replaces the tensor that `buffer` and `gradients` return. The hook's future still has the final gradients.

        Raises:
            TypeError: it is no tensor.
        """
        self._buffer = checked("buffer", buffer, Tensor)

    @torch.no_grad()
    def owned(self, value: Tensor) -> Tensor:
        """Returns a hook's tensor ``value`` if it is the hook's buffer, else a copy in the buffer's dtype.

        The copy is made on the current stream. So the hook may keep a tensor of its own.
        """
        if value is self.summed:
            return value
        shape, dtype, device = self.kind
        return torch.empty(shape, dtype=dtype, device=device).copy_(value)

    def gradients(self) -> list[Tensor]:
        """For each parameter a view into `buffer` that has the parameter's shape.

        Raises:
            RuntimeError: `set_buffer` was given a tensor of another size.
        """
        numels = [parameter.numel() for parameter in self._parameters]
        if self._buffer.shape != (sum(numels),):
            raise RuntimeError(
                f"the buffer of {self} has the shape {[*self._buffer.shape]} since set_buffer. It is no longer the "
                f"{sum(numels)} elements of its parameters in a row, so it has no views of their shapes"
            )
        parts = self._buffer.split(numels)
        return [part.view(each.shape) for part, each in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        """The module's parameters whose gradients are in the bucket."""
        return [*self._parameters]

    def __str__(self) -> str:
        (numel,), dtype, _ = self.kind
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"bucket {self._index} of {self.count} ({self.names[0]!r}{more}, {numel} x {dtype})"


class CommHook:
    """A registered hook. Messages call it ``name``."""

    def __init__(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        what = "hook(state, bucket) that returns a torch.futures.Future of the bucket's flat tensor"
        self.state, self.hook = state, checked("hook", hook, Callable, hint=f" {what}. Pass the state first")
        self.name = _name_of(hook)

    @torch.no_grad()
    def call(self, bucket: GradBucket) -> Any:
        """Calls the hook, and returns its future. An error of the hook becomes the cause of a ``RuntimeError``."""
        try:
            future = self.hook(self.state, bucket)
        except Exception as error:
            raise RuntimeError(
                f"the communication hook {self.name} has failed for {bucket}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(future, torch.Future):
            raise TypeError(
                f"the communication hook {self.name} has returned {_kind_of(future)} for {bucket}. It has to return a "
                "torch.futures.Future of the bucket's flat tensor: the get_future() of an asynchronous collective, or "
                "a Future() whose set_result(tensor) has been called"
            )
        return future

    def value(self, bucket: GradBucket, future: Any) -> Tensor:
        """Returns the tensor of the hook's future, which is done. The current stream waits for it.

        It has the bucket's shape and device, and its dtype or that of the tensor that the hook gave to
        `GradBucket.set_buffer`: torch's ``fp16_compress_wrapper`` returns such a tensor.
        """
        try:
            value = future.wait()
        except Exception as error:
            raise RuntimeError(
                f"the future of the communication hook {self.name} has failed for {bucket}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(value, (list, tuple)) and len(value) == 1:  # the future of a collective has such a list
            (value,) = value
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the future of the communication hook {self.name} has {_kind_of(value)} for {bucket}; it has to have "
                "the bucket's flat tensor"
            )
        shape, dtype, device = bucket.kind
        found = []
        if value.shape != shape:
            found.append(f"the shape {[*value.shape]} instead of {[*shape]}")
        if value.dtype not in (dtype, bucket.buffer().dtype):
            found.append(f"the dtype {value.dtype} instead of {dtype}")
        if value.device != device:
            found.append(f"the device {value.device} instead of {device}")
        if value.layout is not torch.strided:
            found.append(f"the layout {value.layout} instead of {torch.strided}")
        if found:
            raise ValueError(
                f"the communication hook {self.name} has left a tensor for {bucket} that has {' and '.join(found)}. "
                "Its future has to have a tensor like bucket.buffer(); compressed gradients have to be restored first"
            )
        return value


def wait_for(future: Any) -> None:
    """Blocks until the future is done, or has failed. Ctrl-C interrupts this in the main thread."""
    if not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        done.wait()


def _name_of(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


def _kind_of(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class HookedSums:
    """A `Reducer` that calls a hook, without other machines. It is its `ReducerPass` too: one pass runs at a time."""

    def __init__(self, hook: CommHook) -> None:
        self.hook = hook
        self._has_begun = self._has_failed = False  # in this pass
        self._last_future: Any = None  # of the last call, if it was not done at once

    def begin_pass(self, contents: str) -> HookedSums:
        self._has_begun = self._has_failed = False
        return self

    def launch(self, bucket: GradBucket) -> HookCall | None:
        """Calls the hook, once the future of the previous bucket is done, unless the hook has failed in this pass."""
        if self._has_failed:
            return None
        self._has_begun = True
        previous, self._last_future = self._last_future, None
        try:
            if previous is not None:
                wait_for(previous)
            hook_call = HookCall(self.hook, bucket)
        except BaseException:
            self._has_failed = True
            raise
        self._last_future = None if hook_call.future.done() else hook_call.future
        return hook_call

    def fail(self, error: BaseException, missing: Iterator[GradBucket]) -> None:
        """See `ReducerPass`. If there are other processes only the hook knows of them: it gets all buckets or none.

        Where there is no memory for those that are left, the log says that it does not get them: a destructor may call
        this, and the pass has an error already.
        """
        try:
            for bucket in missing if self._has_begun else ():
                self.launch(bucket)
        except torch.OutOfMemoryError as out_of_memory:
            log.warning("the communication hook %s does not get all buckets: %s", self.hook.name, out_of_memory)

    def end_pass(self, used: Sequence[bool], order: Sequence[int] | None) -> Future[Any]:
        """See `ReducerPass`. A gradient is ``None`` if no slot has used the parameter."""
        known = Future[Any]()
        known.set_result((used, None))
        return known


class HookCall:
    """One call of the hook, which waits for the event ``summed`` or else for the current stream. It begins at once."""

    def __init__(self, hook: CommHook, bucket: GradBucket, summed: Event | None = None) -> None:
        self._hook, self._bucket = hook, bucket
        self._device = bucket.buffer().device
        self._stream = None if self._device.type == "cpu" else kept_stream(self._device, "hooks")
        with self._stream_set(bucket.buffer(), summed):
            self.future = hook.call(bucket)
        self._was_done = self.future.done()
        self._event = None if self._stream is None else Event(self._stream)

    def check(self) -> None:
        """Raises as `CommHook.value`. The future has to be done."""
        self._hook.value(self._bucket, self.future)

    def wait(self) -> Tensor:
        """Returns the gradients, on the current stream."""
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
        """Makes the stream and the device of hooks current inside the block. The stream waits for ``flat`` first."""
        if self._stream is None:
            yield
            return
        (summed or Event(current_stream_at(self._device.index))).make_wait(self._stream)
        # If the pass fails, no stream waits for this one before the memory is used again.
        flat.record_stream(self._stream)
        with current_device_set(self._device), streams_set({self._device: self._stream}):
            yield
