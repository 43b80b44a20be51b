"""`SourceBucket` sums a bucket's gradients of kept replicas in backward, or `GradientSums` keeps them for a later one.

The node of the bucket calls it when the last slot has the gradients (`ToSlots`). Many passes use one bucket. The module
has one `GradientSums` for all buckets. `ReducerSums` is for modules whose sums go on to a `Reducer`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.bucket_gradients import ReadyEvent, SlotGradients, SourceGradients, ToSlots, wrap_hooks
from dataparallel.autograd.pass_of_backward import PassOfBackward, running_pass
from dataparallel.comm.buckets import Bucket, flatten, has_strides, unflatten
from dataparallel.comm.streams.current import streams_joined, streams_set
from dataparallel.devices import CPU


def written_sources(behind: Sequence[Any], sources: Sequence[Tensor]) -> set[int]:
    """Asks the engine for the positions of the sources whose ``.grad`` the running pass writes.

    ``behind``: the ``next_functions`` of their node. A buffer may be the result of a computation: then its gradient
    goes on into the computation's graph. The engine leaves out a leaf that was frozen after the forward.
    """
    written = set()
    for position, (following, _) in enumerate(behind):
        source = sources[position]
        try:
            if source.is_leaf and source.requires_grad and _torch.will_engine_execute_node(following):
                written.add(position)
        except RuntimeError:  # torch raises it for a leaf whose gradient `torch.autograd.grad` is to return
            pass
    return written


class SourceBucket:
    """The parameters and buffers of the user's module that are in one bucket (``sources``), and how they are summed.

    ``backward(inputs=...)`` may write ``.grad`` of some parameters only, so backward asks the engine which they are.

    - If sums are on, a parameter whose ``.grad`` is written gets the sum, plus its gradients that have waited. At the
      end of the pass other parameters' waiting gradients are added to ``.grad``. So ``.grad`` is as on one device.
    - If sums are off, a parameter whose ``.grad`` is written gets slot 0's gradient, and gradients of other slots wait.
    - A pass that writes no ``.grad`` (``torch.autograd.grad``) returns the sum of its own gradients. No waiting
      gradient is used.
    - A pass that is recorded (``create_graph=True``) always gets sums, and the waiting gradients of the parameters that
      it reaches: it does not add to ``.grad`` in place, but puts another tensor there.

    The user may throw gradients away. So waiting gradients are void, and dropped, if the source's ``.grad`` is
    ``None``, is another tensor, or has been set to zero.

    ``streams``: the computing streams of the forward that uses the bucket.
    """

    def __init__(
        self, sums: GradientSums, sources: Sequence[Tensor], streams: dict[torch.device, torch.Stream]
    ) -> None:
        self.sums, self.sources, self.streams = sums, list(sources), streams
        # A buffer that is the result of a computation has no `.grad`.
        self.has_leaves_only = all(source.is_leaf for source in sources)

    def sum(self, node: Any, by_slot: Sequence[SlotGradients | None]) -> SourceGradients | None:
        """Returns the sums over the slots, or slot 0's gradients; see `SumsOfBucket`. ``node``: the `ToSlots`."""
        ((from_source, _),) = node.next_functions
        written = written_sources(from_source.next_functions, self.sources)
        if written:
            if self.has_leaves_only and not self.sums.are_on and not torch.is_grad_enabled():
                return SourceGradients(self.sums.keep(self, by_slot, written), None, node.source_device)
            if taken := self.sums.take(self, written):
                by_slot = self.with_kept_gradients(node, by_slot, taken)
        return ToSlots.sum_over_slots(node, by_slot)

    def as_lists(self, by_slot: Sequence[SlotGradients | None]) -> list[list[Tensor | None]]:
        return [[None] * len(self.sources) if of_slot is None else of_slot.as_list() for of_slot in by_slot]

    def with_kept_gradients(
        self, node: Any, by_slot: Sequence[SlotGradients | None], taken: Sequence[WaitingGradients]
    ) -> list[SlotGradients | None]:
        """Adds gradients that `GradientSums.take` has taken to the gradients of this pass, on the adding streams."""
        with ToSlots.adding_streams_set(node):
            for of_slot in by_slot:
                if of_slot is not None:
                    of_slot.receive()
            lists = self.as_lists(by_slot)
            positions = {id(source): position for position, source in enumerate(self.sources)}
            for waiting in taken:
                position = positions[id(waiting.parameter)]
                for slot, kept in waiting.by_slot.items():
                    grad = lists[slot][position]
                    lists[slot][position] = kept.receive() if grad is None else kept.receive() + grad
            return [*map(SlotGradients, lists)]


class KeptGradient(NamedTuple):
    """A gradient that waits on its slot. ``ready_event`` has the stream that made it; see `SlotGradients`."""

    grad: Tensor
    ready_event: ReadyEvent | None
    streams: dict[torch.device, torch.Stream]  # the computing streams of the forward

    def receive(self) -> Tensor:
        """Makes the current stream of the gradient's device wait for the gradient, and returns it."""
        if self.ready_event is not None:
            self.ready_event.receive([self.grad])
        return self.grad


class FormerGrad:
    """The ``.grad`` to which waiting gradients of a parameter belong. The user may throw them away with it."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        self.update()

    def update(self) -> None:
        """Notes the ``.grad`` that the parameter has now."""
        self._grad = self.parameter.grad  # strongly: torch swaps no tensor with weak references
        self._writes = 0 if self._grad is None else self.writes_to(self._grad)

    def is_void(self) -> bool:
        """True if ``.grad`` is another tensor now, or has been set to zero since. Passes may have added to it."""
        grad = self.parameter.grad
        if grad is None or self._grad is not grad:
            return True
        return self.writes_to(grad) != self._writes and self.is_zero(grad)

    def writes_to(self, grad: Any) -> int:
        """A number that changes when ``grad`` is set to zero."""
        return _torch.version_of(grad)

    def is_zero(self, grad: Any) -> bool:
        return not bool(grad.any())


class WaitingGradients(FormerGrad):
    """The gradients of one source, ``parameter``, that wait on slots.

    Attributes:
        passes: running passes that have kept gradients. They may not have written ``.grad`` yet.
        reduced: a copy of the ``.grad`` from before gradients waited, for `ReducerSums`.
    """

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(parameter)
        self.by_slot: dict[int, KeptGradient] = {}
        self.passes: set[PassOfBackward] = set()  # reentrant checkpoints nest passes
        self.reduced: KeptGradient | None = None


def hooked(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Returns a gradient as the hooks on its parameter change it, where no node of the engine calls them."""
    for hook in [*(_torch.hooks_of(parameter) or {}).values()]:
        returned = hook(gradient)
        if returned is None:
            continue
        if not isinstance(returned, Tensor):
            raise TypeError(
                f"a hook on a parameter returns a tensor or None; {hook!r} returned {type(returned).__name__}"
            )
        if returned.dtype != gradient.dtype or returned.shape != gradient.shape:
            raise ValueError(
                f"a hook on a parameter was given a gradient of shape {tuple(gradient.shape)} and {gradient.dtype}, "
                f"and has to return one; {hook!r} returned one of shape {tuple(returned.shape)} and {returned.dtype}"
            )
        gradient = returned
    return gradient


class GradientSums:
    """The gradients of one module that wait on slots, and the switch of its sums.

    Waiting gradients belong to no graph: the next pass with sums takes them, even if it goes over other copies. Passes
    in several threads may keep and take at the same time, as those that reentrant checkpoints start on each slot do.

    The reentrant ``lock`` is held while gradients are kept, taken or looked at: a destructor may end a failed pass.
    """

    first_waiting_slot = 1
    """Slot 0's gradients are in ``.grad`` and do not wait."""

    def __init__(self) -> None:
        self.are_on = True
        self.lock = threading.RLock()
        self._waiting: dict[int, WaitingGradients] = {}  # by the id of the source

    def start_afresh_after_fork(self) -> None:
        """In a forked child: a thread of the parent may have held the lock."""
        self.lock = threading.RLock()

    def keep(
        self, bucket: SourceBucket, by_slot: Sequence[SlotGradients | None], written: Set[int]
    ) -> list[Tensor | None]:
        """Keeps the gradients of the ``written`` sources on all slots but slot 0, and returns slot 0's gradients.

        If only other slots have a gradient, slot 0's gradient is zeros: a ``.grad`` of ``None`` would say that the
        waiting gradients are void.
        """
        slot_0, *others = lists = bucket.as_lists(by_slot)
        running = running_pass()
        with self.lock:
            self.drop_void(bucket.sources)
            if running.is_first((self, "keep")):
                running.on_end(partial(self._end_pass, running))
            found: dict[int, WaitingGradients] = {}
            for position in written:
                source = bucket.sources[position]
                has_some = any(grads[position] is not None for grads in lists[self.first_waiting_slot :])
                if has_some or id(source) in self._waiting:
                    found[position] = self._waiting.get(id(source)) or self.begin_keeping(source)
                    found[position].passes.add(running)
                if has_some and slot_0[position] is None:
                    slot_0[position] = torch.zeros_like(source)
            for slot, grads in enumerate(others, start=1):
                if (of_slot := by_slot[slot]) is not None:
                    of_sources = [(each, grad) for i, each in found.items() if (grad := grads[i]) is not None]
                    event = of_slot.ready_event or _event_on_current_stream([grad for _, grad in of_sources])
                    kept = [(each, KeptGradient(grad, event, bucket.streams)) for each, grad in of_sources]
                    _add_to_kept(slot, kept)
        return [grad if position in written else None for position, grad in enumerate(slot_0)]

    def begin_keeping(self, source: Tensor) -> WaitingGradients:
        """Called before the first pass that keeps gradients of the source writes the source's ``.grad``.

        If the pass fails, its kept gradients belong to the present ``.grad``; without one they are void.
        """
        self._waiting[id(source)] = WaitingGradients(source)
        return self._waiting[id(source)]

    def take(self, bucket: SourceBucket, written: Set[int]) -> list[WaitingGradients]:
        """Removes and returns the waiting gradients of the ``written`` sources. The running pass is to add them."""
        running = running_pass()
        with self.lock:
            if self.are_on and running.is_first((self, "add_kept")):
                # Gradients of sources that this pass does not reach are added to ``.grad`` when it ends.
                running.on_end(lambda ok: self.add_kept() if ok else None)
            self.drop_void(bucket.sources)
            return self._take([id(bucket.sources[position]) for position in written])

    @property
    def ids_waiting(self) -> Set[int]:
        """The ids of the sources whose gradients wait."""
        return self._waiting.keys()

    def drop_void(self, sources: Sequence[Tensor] | None = None) -> None:
        """Frees the void gradients of ``sources``, or of all sources, except where a running pass writes ``.grad``."""
        if not self._waiting:
            return
        with self.lock:
            ids = [*self._waiting] if sources is None else [*map(id, sources)]
            found = [(each, self._waiting[each]) for each in ids if each in self._waiting]
            self._take([each for each, waiting in found if not waiting.passes and waiting.is_void()])

    @torch.no_grad()
    def add_kept(self) -> None:
        """Adds all waiting gradients, as the hooks on their sources change them, to ``.grad``, except void ones."""
        with self.lock:
            self.drop_void()
            taken = self._take([each for each, waiting in self._waiting.items() if not waiting.passes])
        for waiting in taken:
            kept, source = [waiting.by_slot[slot] for slot in sorted(waiting.by_slot)], waiting.parameter
            # They were made on the streams of their forward; ``.grad`` may have been written on other streams.
            with streams_joined(kept[0].streams):
                if source.grad is not None:  # else void: the engine still holds a pass that has failed
                    total = comm.reduce_add([each.receive() for each in kept], source.device)
                    source.grad.add_(hooked(source, total))

    def _end_pass(self, ended: PassOfBackward, ok: bool) -> None:
        """If the pass has succeeded, its kept gradients belong to the ``.grad`` that it has written."""
        with self.lock:
            for waiting in [*self._waiting.values()]:
                if ended in waiting.passes:
                    waiting.passes.discard(ended)
                    if ok and waiting.parameter.grad is not None:
                        waiting.update()

    def _take(self, source_ids: Sequence[int]) -> list[WaitingGradients]:
        return [self._waiting.pop(each) for each in source_ids if each in self._waiting]


def _event_on_current_stream(grads: Sequence[Tensor]) -> ReadyEvent | None:
    """Slots on one device need no events within a pass. But another pass may take the gradients on other streams."""
    if not grads or grads[0].device == CPU:
        return None
    return ReadyEvent(torch.accelerator.current_stream(grads[0].device))


def _add_to_kept(slot: int, gradients: Sequence[tuple[WaitingGradients, KeptGradient]]) -> None:
    """Adds gradients to those that wait on a slot, on the stream that makes the slot's gradients."""
    event = gradients[0][1].ready_event if gradients else None
    with streams_set({} if event is None else {event.stream.device: event.stream}):
        sums = {
            waiting: waiting.by_slot[slot].receive() + new.grad for waiting, new in gradients if slot in waiting.by_slot
        }
    if event is not None and sums:
        event = ReadyEvent(event.stream)
    for waiting, new in gradients:
        is_added = waiting in sums
        waiting.by_slot[slot] = new._replace(grad=sums[waiting], ready_event=event) if is_added else new


class ReducerSums(GradientSums):
    """The gradients of a module that has a `Reducer`.

    - Slot 0's gradients wait in ``.grad``, but the reducer has to get them together with those of other slots, and
      without the sums that it has reduced before. So these sums are copied when gradients begin to wait. The pass that
      takes the gradients writes the copy back to ``.grad`` when it has succeeded on all machines.
    - Only a pass with sums takes gradients that wait, and only of sources whose ``.grad`` it writes. If the pass fails,
      the gradients wait again.
    """

    first_waiting_slot = 0
    """Slot 0's gradients wait too, in ``.grad``."""

    def keep(
        self, bucket: SourceBucket, by_slot: Sequence[SlotGradients | None], written: Set[int]
    ) -> list[Tensor | None]:
        """See `GradientSums.keep`. Hooks on the sources rest in this pass: they see what waits later, in the sum."""
        for position in written:
            wrap_hooks(_torch.hooks_of(bucket.sources[position]), lambda hook: lambda grad: None)
        return super().keep(bucket, by_slot, written)

    def begin_keeping(self, source: Tensor) -> WaitingGradients:
        """See `GradientSums.begin_keeping`. The running pass adds to the ``.grad`` that is copied here."""
        waiting = super().begin_keeping(source)
        if source.grad is not None:
            copy = source.grad.clone()
            waiting.reduced = KeptGradient(copy, _event_on_current_stream([copy]), {})
        return waiting

    def add_kept(self) -> None:
        """Does nothing: gradients are added to ``.grad`` only after the reducer has had them."""

    def take(self, bucket: SourceBucket, written: Set[int]) -> list[WaitingGradients]:
        """See `GradientSums.take`: those of all slots. The forward's streams are current."""
        taken = super().take(bucket, written)
        # Without a ``.grad`` the gradients are void, and the engine still holds the pass that has failed.
        found = [(waiting, grad) for waiting in taken if (grad := waiting.parameter.grad) is not None]
        of_slot_0 = [grad if waiting.reduced is None else grad - waiting.reduced.receive() for waiting, grad in found]
        device = bucket.sources[0].device
        event = None if device.type == "cpu" or not found else ReadyEvent(torch.accelerator.current_stream(device))
        for (waiting, _), grad in zip(found, of_slot_0, strict=True):
            waiting.by_slot[0] = KeptGradient(grad, event, bucket.streams)
        return [waiting for waiting, _ in found]

    def remove_from_grads(self, taken: Sequence[WaitingGradients]) -> None:
        """Removes slot 0's gradients from ``.grad`` after the pass has succeeded.

        The reduced gradients, which the pass adds next, contain them. The streams of the forward are current, and the
        engine orders the additions after them.
        """
        for waiting in taken:
            if waiting.reduced is None or waiting.parameter.grad is None:
                waiting.parameter.grad = None
            else:
                waiting.parameter.grad.copy_(waiting.reduced.receive())

    def put_back(self, taken: Sequence[WaitingGradients]) -> None:
        """Lets gradients wait again after the pass that has taken them has failed. No ``.grad`` has changed."""
        with self.lock:
            for waiting in taken:
                del waiting.by_slot[0]
                waiting.passes.clear()
                present = self._waiting.setdefault(id(waiting.parameter), waiting)
                for slot, kept in waiting.by_slot.items() if present is not waiting else ():
                    _add_to_kept(slot, [(present, kept)])


class ReducerBucket(SourceBucket):
    """A bucket, and the layout of the flat buffer that a `Reducer` gets for it.

    In the buffer each gradient has the order of a contiguous tensor, whatever its strides are, so that the buffer is
    the same on all machines.
    """

    def __init__(
        self,
        sums: GradientSums,
        sources: Sequence[Tensor],
        streams: dict[torch.device, torch.Stream],
        names: Sequence[str],
    ) -> None:
        super().__init__(sums, sources, streams)
        self.names = list(names)
        for name, source in zip(names, sources, strict=True):
            if not has_strides(source):
                raise TypeError(
                    f"parameter {name!r} is {'nested' if source.is_nested else source.layout}: its gradient cannot "
                    "travel in a flat buffer. Pass it in ignored_params, and sum its gradient yourself"
                )
        self.layout = Bucket.row_major_of(sources, range(len(sources)))

    def describe(self) -> str:
        """Returns words that are equal on all machines if their buckets have the same sources."""
        members = [f"{self.names[i]} {list(self.sources[i].shape)}" for i in self.layout.indices]
        return f"{self.sources[0].dtype}: {', '.join(members)}"

    def flat_of(self, sums: SourceGradients | None) -> Tensor:
        """Returns gradients in a flat buffer with this layout: in theirs if it has that, else on the current stream."""
        if sums is None:
            return self.zeros()
        is_row_major = sums.bucket is not None and all(layout.row_major for layout, _ in sums.bucket.runs)
        if sums.bucket is not None and is_row_major and sums.bucket.indices == self.layout.indices:
            assert sums.flat is not None
            return sums.flat
        filled = []
        for name, source, grad in zip(self.names, self.sources, sums.grads_on_side_streams, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {name!r} has the layout {grad.layout}, and gradients go on to other machines, or "
                    "to a hook, in flat buffers. Make it dense, with sparse=False in an Embedding; or pass the "
                    "parameter in ignored_params, and sum its gradient yourself"
                )
            filled.append(torch.zeros_like(source) if grad is None else grad)
        return flatten(self.layout, filled)

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """The gradients in a flat buffer, in the order of the sources."""
        parts = dict(zip(self.layout.indices, unflatten(self.layout, flat), strict=True))
        return [parts[i] for i in range(len(self.sources))]

    def zeros(self) -> Tensor:
        return torch.zeros(self.layout.numel, dtype=self.sources[0].dtype, device=self.sources[0].device)
