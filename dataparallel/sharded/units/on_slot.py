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
from dataparallel.sharded.units.buffers import FullBuffer, no_room_for
from dataparallel.sharded.units.shards import Source, wait_for

if TYPE_CHECKING:
    from dataparallel.sharded.units.calls import ModuleOnSlot
    from dataparallel.sharded.units.unit import Unit


class UnitOnSlot:
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
            self._groups = [
                FullBuffer(owned.layout, unit.dtype_on_slots(owned.dtype), self.device) for owned in unit.owned
            ]
        self.parameters: list[Tensor] = [torch.empty(0)] * len(unit.parameters)
        for indices, full in zip(unit.indices, self._groups, strict=True):
            for i, tensor in zip(indices, full.tensors, strict=True):
                tensor.__class__ = ReplicaParameter
                self.parameters[i] = tensor
        self.is_full = False
        self.last_pull: Event | None = None
        self._pulled: Event | None = None  # after the pulls that have been started
        self._sent: Sequence[Source] | None = None  # on their way from other machines, to be pulled
        self._stream: torch.Stream | None = None  # the computing stream that used the parameters last
        self._filled_on: torch.Stream | None = None  # the one that their memory belongs to
        self._versions: list[int] = []  # of the values that are here or on their way
        self._full_versions: list[int] = []  # of the full parameters; our own writes do not move them
        self._overwritten: int | None = None
        # Weakly: parameters may stay full in any number of forwards, and a replica's object lives as long as it.
        self._shown_in: weakref.WeakSet[ModuleOnSlot] = weakref.WeakSet()
        self._users = 0  # calls of the unit's modules that run
        self._open: set[object] = set()  # calls whose backward has begun and not ended
        self._has_all_gradients = False
        self.is_in_backward = False
        self._is_kept = False
        self._have_run: set[int] = set()  # of the unit's modules, in this forward

    @property
    def is_started(self) -> bool:
        """True if values are here or on their way."""
        is_pulled = self._pulled is not None or any(full.gathered is not None for full in self._groups)
        return self.is_full or is_pulled or self._sent is not None

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
        with torch.no_grad(), self._named_if_no_room():
            has_pulled = _torch.is_in_backward() and unit.pieces.pull(self.slot, self._groups)
        if not has_pulled:
            self._sent = unit.sent_sources(self.slot, ready)
            if self._sent is not None or self._take_joint(ready, ahead):
                return
            with torch.no_grad(), self._named_if_no_room():
                self._pull_from_owners(unit.sources(), ready)
        if own is not None and self._groups:
            self.last_pull = self._pulled = Event(own)

    def _take_joint(self, ready: Mapping[torch.device, Event], ahead: bool) -> bool:
        """Takes what arrives by a joint gather, if it does not come later. Returns false if the slot has to pull."""
        arrived = self.unit.joint.take_arrived(self.slot, ready, ahead)
        if isinstance(arrived, bool):
            return arrived
        for full, matrix in zip(self._groups, arrived.matrices, strict=True):
            full.set_gathered(matrix)
        self._pulled, self._versions = arrived.event, arrived.versions
        return True

    def _pull_from_owners(self, sources: Sequence[Source], ready: Mapping[torch.device, Event]) -> None:
        own, streams = self.unit.streams.receiving[self.slot], self.unit.streams.pulling[self.slot]
        if own is not None:  # copies to this stream begin after it, so the streams on which they leave need not wait
            wait_for({*ready.values()}, [own])
        for full, source in zip(self._groups, sources, strict=True):
            pieces, made = source.pieces(ready)
            try:
                for device, event in made.items():
                    event.make_wait(streams[device])
                with streams_set(streams):
                    full.pull(pieces, self.slot)
            finally:
                source.end_pull([] if own is None else [Event(own)])

    @contextmanager
    def _named_if_no_room(self) -> Iterator[None]:
        """Around an allocation: an error for lack of memory names the unit and the device, and frees what is here."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.free()
            raise no_room_for("parameters", self.unit.name, self.device, self.unit.full_bytes, error) from error

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
        with torch.no_grad(), self._named_if_no_room():
            if self._sent is not None:
                sent, self._sent = self._sent, None
                self._pull_from_owners(sent, ready)
                if own is not None:
                    self._pulled = Event(own)  # it reads copies, of which `LastCopies` knows, and no shards
            if self._pulled is not None:
                wait_for([self._pulled], computing.values())
            for full in self._groups:
                gathered = full.fill()
                if own is not None:
                    wait_for([Event(stream) for stream in computing.values()], [own])
                del gathered
        self._pulled, self._filled_on = None, self._stream
        self.is_full = True
        if not self._full_versions:
            self._full_versions = self._versions_of_full()

    def use(self, ready: Mapping[torch.device, Event], module: ModuleOnSlot) -> None:
        """Makes the parameters full, and keeps them so until `end_use`."""
        with self._lock:
            self.make_full(ready)
            self.show_in(module)
            self._users += 1

    def show_in(self, module: ModuleOnSlot) -> None:
        """Registers the full parameters in a replica, until they are freed. They are full now."""
        with self._lock:
            self._shown_in.add(module)
            module.register(self.parameters)

    def end_use(self) -> None:
        """A call of one of the unit's modules has ended."""
        with self._lock:
            self._users -= 1

    def free(self) -> None:
        """Frees the parameters, and a gather that has been started, unless a call uses them."""
        with self._lock:
            if self._users:
                return
            self._note_overwritten()
            if self.is_full and self._stream is not None and self._stream != self._filled_on:
                wait_for([Event(self._stream)], [self._filled_on] if self._filled_on is not None else [])
            for full in self._groups:
                full.gathered = None  # memory of the receiving stream, which alone has used it
                full.free()
            self._pulled = self._sent = None
            self.is_full = False
            for module in self._shown_in:
                module.register(self.unit.parameters)
            self._shown_in.clear()

    def copy_from(self, other: UnitOnSlot) -> None:
        """Has what another slot has, unless values are here or on their way. The computing streams are current."""
        with self._lock:
            if self.is_started:
                return
            with torch.no_grad(), self._named_if_no_room():
                for full, theirs in zip(self._groups, other._groups, strict=True):
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
            found, self._overwritten = self._overwritten, None
            if found is not None:
                self.free()
            return found

    def _note_overwritten(self) -> None:
        if self.is_full and (now := self._versions_of_full()) != self._full_versions:
            changed = [a != b for a, b in zip(now, self._full_versions, strict=True)]
            self._overwritten, self._full_versions = changed.index(True), now

    def _versions_of_full(self) -> list[int]:
        return [*map(_torch.version_of, self.parameters)]

    # ---- when to free ------------------------------------------------------------------------------------------------

    def module_ended(self, number: int, has_backward: bool, is_announced: bool = True) -> None:
        """One of the unit's modules has run, and with ``has_backward`` a graph may lead to it.

        ``is_announced``: the gradient of an output says when its backward begins; else the parameters stay for it.
        """
        with self._lock:
            self._have_run.add(number)
            if len(self._have_run) < self.unit.number_of_modules:
                return
            self._have_run.clear()
            if is_announced or not has_backward:
                self._free_after_forward(has_backward)

    def forward_ended(self, has_failed: bool) -> None:
        """The forward of the whole tree has ended."""
        with self._lock:
            was_incomplete = bool(self._have_run)
            self._have_run.clear()
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
            if self.is_full and not self._users:
                stream = self._stream
                streams = {} if stream is None else {self.device: stream}
                with self._named_if_no_room(), torch.no_grad(), streams_set(streams):
                    unit.pieces.keep(self.slot, size, self.parameters, self._versions, stream)
        self.free()

    def backward_began(self, call: object | None) -> None:
        """A call's backward begins. ``call`` is given if it will end with `backward_ended`."""
        with self._lock:
            self._has_all_gradients, self.is_in_backward = False, True
            if call is not None:
                self._open.add(call)

    def backward_ended(self, call: object) -> None:
        """All inputs of a call have their gradients."""
        with self._lock:
            self._open.discard(call)
            self._free_after_backward()

    def received(self) -> None:
        """All parameters have their gradients."""
        with self._lock:
            self._has_all_gradients = True
            self._free_after_backward()

    def _free_after_backward(self) -> None:
        # A recorded pass is followed by one through its graph, whose nodes read the parameters.
        if self._is_kept or torch.is_grad_enabled():
            return
        if not self._open and (self._has_all_gradients or not self.unit.recorded):
            self.is_in_backward = False
            if self.unit.reshard_after_backward:
                self.free()

    def pass_ended(self, has_failed: bool, was_recorded: bool) -> None:
        """A pass of backward has ended. If it was recorded, a pass through its own graph may follow."""
        with self._lock:
            self._open.clear()
            self.is_in_backward = False
            self._is_kept = was_recorded and not has_failed
            if self._is_kept:
                return
            if has_failed or self.unit.reshard_after_backward:
                self.free()

    def _order_computing_streams(self) -> None:
        """Orders uses of the parameters on another computing stream after those on the last one."""
        now = current_streams([self.device]).get(self.device)
        if self._stream is not None and now is not None and now != self._stream:
            Event(self._stream).make_wait(now)
        self._stream = now
