"""The parameters of one unit on one slot: gathered before they are used, freed after it.

They are the same tensors for the whole life of the unit; their memory comes and goes. So tensors that autograd saved in
forward have their values again once the unit is gathered in backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.profiling import stage
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.sharded.units.buffers import FullBuffer, out_of_memory_error
from dataparallel.sharded.units.shards import PullSource, wait_for

if TYPE_CHECKING:
    from dataparallel.sharded.units.calls import ModuleRunner
    from dataparallel.sharded.units.unit import Unit


class SlotUnit:
    """One unit on one slot. Any thread may use it.

    A gather has two steps. `start` lets the slot pull all pieces into a matrix, on side streams, and may come early.
    `make_full` makes the computing stream wait for that, copies parameters out, and drops the matrix. To read the
    parameters while they have no bytes crashes the process: a replica's registries hold the sharded ones except while
    the unit runs there. Memory is freed to the stream it belongs to: the full buffer to the computing stream, which
    alone uses it, and the matrix to the receiving stream after an event at the end of the copy out.

    Attributes:
        parameters: in the order of the unit's, without a graph: `nodes.make_outputs` makes it.
        is_full: true while the parameters have their values.
        is_in_backward: the backward of a call has begun and not ended.
        last_pull: after the last reads of shards.
    """

    def __init__(self, unit: Unit, slot: int) -> None:
        self.unit, self.slot, self.device = unit, slot, unit.slots[slot]
        self._lock = threading.RLock()
        with torch.inference_mode(False), torch.no_grad():
            self._buffers = [
                FullBuffer(owned.layout, unit.dtype_on_slots(owned.dtype), self.device) for owned in unit.owned
            ]
        self.parameters: list[Tensor] = [torch.empty(0)] * len(unit.parameters)
        for indices, full in zip(unit.indices, self._buffers, strict=True):
            for i, tensor in zip(indices, full.tensors, strict=True):
                tensor.__class__ = ReplicaParameter
                self.parameters[i] = tensor
        self.is_full = False
        self.last_pull: Event | None = None
        self._pull_event: Event | None = None  # after the pulls that have been started
        self._sent_sources: Sequence[PullSource] | None = None  # on their way from other machines, to be pulled
        self._last_stream: torch.Stream | None = None  # the computing stream that used the parameters last
        self._memory_stream: torch.Stream | None = None  # the one that their memory belongs to
        self._versions: list[int] = []  # of the values that are here or on their way
        self._full_versions: list[int] = []  # of the full parameters; our own writes do not move them
        self._overwritten_position: int | None = None
        # Weakly: parameters may stay full in any number of forwards, and a replica's object lives as long as it.
        self._showing_modules: weakref.WeakSet[ModuleRunner] = weakref.WeakSet()
        self._running_calls = 0  # calls of the unit's modules that run
        self._open_calls: set[object] = set()  # calls whose backward has begun and not ended
        self._has_all_gradients = False
        self.is_in_backward = False
        self._is_kept_for_graph = False
        self._modules_run: set[int] = set()  # of the unit's modules, in this forward

    @property
    def is_started(self) -> bool:
        """True if values are here or on their way."""
        is_pulled = self._pull_event is not None or any(full.gathered is not None for full in self._buffers)
        return self.is_full or is_pulled or self._sent_sources is not None

    # ---- gathering and freeing ---------------------------------------------------------------------------------------

    def start(self, ready: Mapping[torch.device, Event], ahead: bool = False) -> None:
        """Starts a gather, unless values are here or on their way.

        ``ready``: for each device an event after which shards there may be read. ``ahead``: nothing is started if that
        would take memory on slots that need the unit later still. An error for lack of memory names unit and device.
        """
        with self._lock:
            if self.is_started:
                return
            with stage("unshard", slot=self.slot):
                self._start(ready, ahead)

    def _start(self, ready: Mapping[torch.device, Event], ahead: bool) -> None:
        """`start`, under the lock."""
        unit, own = self.unit, self.unit.streams.receiving[self.slot]
        self._versions = unit.versions()
        with torch.no_grad(), self._naming_out_of_memory():
            has_pulled = _torch.is_in_backward() and unit.pieces.pull(self.slot, self._buffers)
        if not has_pulled:
            self._sent_sources = unit.sent_sources(self.slot, ready)
            if self._sent_sources is not None or self._take_joint_gather(ready, ahead):
                return
            with torch.no_grad(), self._naming_out_of_memory():
                self._pull_from_owners(unit.sources(), ready)
        if own is not None and self._buffers:
            self.last_pull = self._pull_event = Event(own)

    def _take_joint_gather(self, ready: Mapping[torch.device, Event], ahead: bool) -> bool:
        """Takes what arrives by a joint gather, if it does not come later. Returns false if the slot has to pull."""
        arrived = self.unit.joint.take_arrived(self.slot, ready, ahead)
        if isinstance(arrived, bool):
            return arrived
        for full, matrix in zip(self._buffers, arrived.matrices, strict=True):
            full.set_gathered(matrix)
        self._pull_event, self._versions = arrived.event, arrived.versions
        return True

    def _pull_from_owners(self, sources: Sequence[PullSource], ready: Mapping[torch.device, Event]) -> None:
        own, streams = self.unit.streams.receiving[self.slot], self.unit.streams.pulling[self.slot]
        if own is not None:  # copies to this stream begin after it, so the streams on which they leave need not wait
            wait_for({*ready.values()}, [own])
        for full, source in zip(self._buffers, sources, strict=True):
            pieces, made = source.pieces(ready)
            try:
                for device, event in made.items():
                    event.make_wait(streams[device])
                with streams_set(streams):
                    full.pull(pieces, self.slot)
            finally:
                source.end_pull([] if own is None else [Event(own)])

    @contextmanager
    def _naming_out_of_memory(self) -> Iterator[None]:
        """Around an allocation: an error for lack of memory names the unit and the device, and frees what is here."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.free()
            raise out_of_memory_error("parameters", self.unit.name, self.device, self.unit.full_bytes, error) from error

    def make_full(self, ready: Mapping[torch.device, Event]) -> None:
        """Makes the parameters full. The computing stream is current, and waits for the gather."""
        with self._lock:
            self.start(ready)
            self._order_computing_streams()
            if not self.is_full:
                with stage("unshard", slot=self.slot):
                    self._fill(ready)

    def _fill(self, ready: Mapping[torch.device, Event]) -> None:
        """`make_full` of what has been started, under the lock."""
        computing, own = current_streams([self.device]), self.unit.streams.receiving[self.slot]
        with torch.no_grad(), self._naming_out_of_memory():
            if self._sent_sources is not None:
                sent, self._sent_sources = self._sent_sources, None
                self._pull_from_owners(sent, ready)
                if own is not None:
                    self._pull_event = Event(own)  # it reads copies, of which `LastCopies` knows, and no shards
            if self._pull_event is not None:
                wait_for([self._pull_event], computing.values())
            for full in self._buffers:
                gathered = full.fill()
                if own is not None:
                    wait_for([Event(stream) for stream in computing.values()], [own])
                del gathered
        self._pull_event, self._memory_stream = None, self._last_stream
        self.is_full = True
        if not self._full_versions:
            self._full_versions = self._versions_of_full()

    def use(self, ready: Mapping[torch.device, Event], module: ModuleRunner) -> None:
        """Makes the parameters full, and keeps them so until `end_use`."""
        with self._lock:
            self.make_full(ready)
            self.show_in(module)
            self._running_calls += 1

    def show_in(self, module: ModuleRunner) -> None:
        """Registers the full parameters in a replica, until they are freed. They are full now."""
        with self._lock:
            self._showing_modules.add(module)
            module.register(self.parameters)

    def end_use(self) -> None:
        """A call of one of the unit's modules has ended."""
        with self._lock:
            self._running_calls -= 1

    def free(self) -> None:
        """Frees the parameters, and a gather that has been started, unless a call uses them."""
        with self._lock:
            if self._running_calls:
                return
            self._note_overwritten()
            if self.is_full and self._last_stream is not None and self._last_stream != self._memory_stream:
                wait_for([Event(self._last_stream)], [self._memory_stream] if self._memory_stream is not None else [])
            for full in self._buffers:
                full.gathered = None  # memory of the receiving stream, which alone has used it
                full.free()
            self._pull_event = self._sent_sources = None
            self.is_full = False
            for module in self._showing_modules:
                module.register(self.unit.parameters)
            self._showing_modules.clear()

    def copy_from(self, other: SlotUnit) -> None:
        """Has what another slot has, unless values are here or on their way. The computing streams are current."""
        with self._lock:
            if self.is_started:
                return
            with torch.no_grad(), self._naming_out_of_memory():
                for full, theirs in zip(self._buffers, other._buffers, strict=True):
                    full.set_gathered(theirs.copy_to(self.device), is_matrix=False)
                self._versions = other._versions

    def free_if_changed(self) -> None:
        """Frees values that the sharded parameters do not have any more."""
        with self._lock:
            if self.is_started and self._versions != self.unit.versions():
                self.free()

    def take_overwritten(self) -> int | None:
        """The position of a parameter that other code has written to while full, once. All are freed: slots differ."""
        with self._lock:
            self._note_overwritten()
            found, self._overwritten_position = self._overwritten_position, None
            if found is not None:
                self.free()
            return found

    def _note_overwritten(self) -> None:
        if self.is_full and (now := self._versions_of_full()) != self._full_versions:
            changed = [a != b for a, b in zip(now, self._full_versions, strict=True)]
            self._overwritten_position, self._full_versions = changed.index(True), now

    def _versions_of_full(self) -> list[int]:
        return [*map(_torch.version_of, self.parameters)]

    # ---- when to free ------------------------------------------------------------------------------------------------

    def note_module_end(self, number: int, has_backward: bool, is_announced: bool = True) -> None:
        """One of the unit's modules has run, and with ``has_backward`` a graph may lead to it.

        ``is_announced``: the gradient of an output says when its backward begins; else the parameters stay for it.
        """
        with self._lock:
            self._modules_run.add(number)
            if len(self._modules_run) < self.unit.number_of_modules:
                return
            self._modules_run.clear()
            if is_announced or not has_backward:
                self._free_after_forward(has_backward)

    def note_forward_end(self, has_failed: bool) -> None:
        """The forward of the whole tree has ended."""
        with self._lock:
            was_incomplete = bool(self._modules_run)
            self._modules_run.clear()
            if self.is_in_backward:  # the forward is a recomputation
                return
            if has_failed or not self.is_full:
                self.free()  # started ahead in vain
            elif was_incomplete:
                self._free_after_forward(has_backward=True)

    def _free_after_forward(self, has_backward: bool) -> None:
        unit, size = self.unit, self.unit.reshard_after_forward
        if self.is_in_backward or (size is False and (has_backward or not unit.is_reshard_automatic)):
            return
        if has_backward and not isinstance(size, bool):
            if not unit.has_group(self.slot, size):
                return
            if self.is_full and not self._running_calls:
                stream = self._last_stream
                streams = {} if stream is None else {self.device: stream}
                with self._naming_out_of_memory(), torch.no_grad(), streams_set(streams):
                    unit.pieces.keep(self.slot, size, self.parameters, self._versions, stream)
        self.free()

    def begin_backward(self, call: object | None) -> None:
        """A call's backward begins. ``call`` is given if it will end with `end_backward`."""
        with self._lock:
            self._has_all_gradients, self.is_in_backward = False, True
            if call is not None:
                self._open_calls.add(call)

    def end_backward(self, call: object) -> None:
        """All inputs of a call have their gradients."""
        with self._lock:
            self._open_calls.discard(call)
            self._free_after_backward()

    def note_gradients(self) -> None:
        """All parameters have their gradients."""
        with self._lock:
            self._has_all_gradients = True
            self._free_after_backward()

    def _free_after_backward(self) -> None:
        # A recorded pass is followed by one through its graph, whose nodes read the parameters.
        if self._is_kept_for_graph or torch.is_grad_enabled():
            return
        if not self._open_calls and (self._has_all_gradients or not self.unit.recorded):
            self.is_in_backward = False
            if self.unit.reshard_after_backward:
                self.free()

    def note_pass_end(self, has_failed: bool, was_recorded: bool) -> None:
        """A pass of backward has ended. If it was recorded, a pass through its own graph may follow."""
        with self._lock:
            self._open_calls.clear()
            self.is_in_backward = False
            self._is_kept_for_graph = was_recorded and not has_failed
            if self._is_kept_for_graph:
                return
            if has_failed or self.unit.reshard_after_backward:
                self.free()

    def _order_computing_streams(self) -> None:
        """Orders uses of the parameters on another computing stream after those on the last one."""
        now = current_streams([self.device]).get(self.device)
        if self._last_stream is not None and now is not None and now != self._last_stream:
            Event(self._last_stream).make_wait(now)
        self._last_stream = now
