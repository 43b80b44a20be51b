"""`SlotUnit` gathers the full parameters of one unit on one slot before they are used, and frees them afterwards.

The parameters are the same tensors for the whole life of the unit; only their memory comes and goes. So tensors that
autograd saved in forward have their values again once the unit is gathered in backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import gt

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm import settings
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.comm.streams.held import hold
from dataparallel.profiling import stage
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.sharded.units.buffers import FullBuffer, Layout, PeerTables, naming_out_of_memory
from dataparallel.sharded.units.sharded_unit import Registries, ShardedUnit
from dataparallel.sharded.units.shards import PullSource, wait_for
from dataparallel.weak_members import WeakMembers


class SlotUnit:
    """The full parameters of one unit on one slot. Any thread may use it.

    A gather has two steps. `start` pulls the owners' pieces on a side stream, and may come early: by a kernel straight
    into the parameters' memory, else by copies into a matrix. `make_full` makes the computing stream wait for the
    pulls, and copies the parameters out of the matrix, if there is one. Reading a parameter without bytes crashes the
    process, so a replica's registries hold the sharded ones while the unit does not run. Memory is freed to the stream
    it belongs to: the full buffer to the computing stream, after the pull, and the matrix to the receiving stream,
    after an event at the end of the copy out.

    Attributes:
        parameters: the full ones, in the unit's order. `nodes.make_outputs` gives them a node of the graph.
        is_full: true while the parameters have their values.
        is_unsharded: the user has gathered the parameters by ``unshard()``, and they have not been freed since, nor has
            a backward ended.
        is_in_backward: the backward of a call has begun and not ended.
    """

    def __init__(self, unit: ShardedUnit, slot: int) -> None:
        self.unit, self.slot, self.device = unit, slot, unit.slots[slot]
        self._lock = threading.RLock()
        with torch.inference_mode(False), torch.no_grad():
            self._buffers = [
                FullBuffer(owned.layout, unit.precision.on_slots(owned.dtype), self.device) for owned in unit.owned
            ]
        self.parameters: list[Tensor] = [torch.empty(0)] * len(unit.parameters)
        for indices, full in zip(unit.indices, self._buffers, strict=True):
            for i, tensor in zip(indices, full.tensors, strict=True):
                tensor.__class__ = ReplicaParameter
                self.parameters[i] = tensor
        self.is_full = self.is_unsharded = False
        self._pull_event: Event | None = None  # after the pulls of a gather that `make_full` has not finished
        self._sources: Sequence[PullSource] = ()  # of a gather whose pulls come later, because other machines send
        self._last_stream: torch.Stream | None = None  # the computing stream that used the parameters last
        self._memory_stream: torch.Stream | None = None  # the stream that their memory belongs to
        self._versions: list[int] = []  # versions of the sharded parameters that this slot's values come from
        self._full_versions: list[int] = []  # versions of the full parameters, which our own writes do not move
        self._overwritten_position: int | None = None  # of a full parameter that other code has written to
        # References are weak, because parameters may stay full over many forwards, each with replicas of its own.
        self._showing_modules: WeakMembers[Registries] = WeakMembers()
        self._running_calls = 0  # how many calls of the unit's modules run
        # Calls whose backward has begun and not ended. With a number it ends with the unit's gradients in this pass.
        self._open_calls: dict[object, int | None] = {}
        self._has_all_gradients = False  # of the parameters, in this backward
        self.is_in_backward = False
        self._is_kept_for_graph = False  # a recorded backward has ended, and its graph may still read the parameters
        self._own_references: list[int] = []  # how many the parameters and their memory have without a graph
        self._is_as_after_backward = False  # no call has used the parameters since the last pass of backward
        self._modules_run: set[int] = set()  # numbers of the unit's modules that have run in this forward

    @property
    def is_started(self) -> bool:
        is_pulled = self._pull_event is not None or any(full.gathered is not None for full in self._buffers)
        return self.is_full or is_pulled or bool(self._sources)

    # ---- gathering and freeing ---------------------------------------------------------------------------------------

    def start(self, ready: Mapping[torch.device, Event]) -> None:
        """Starts a gather, unless one has started. ``ready``: for each device an event before reads of shards."""
        with self._lock:
            if self.is_started:
                return
            with stage("unshard", self.slot):
                self._start(ready)

    def _start(self, ready: Mapping[torch.device, Event]) -> None:
        unit = self.unit
        self._versions = unit.versions()
        with torch.no_grad(), self._naming_out_of_memory():
            if _torch.is_in_backward() and self._pull_pieces():
                return
            self._sources = unit.sources(self.slot, ready)
            if not unit.is_sharded_over_machines:
                self._pull_from_owners(ready)

    def _pull_from_owners(self, ready: Mapping[torch.device, Event]) -> None:
        sources, self._sources = self._sources, ()
        receiving = self.unit.streams.receiving[self.slot]
        if receiving is not None:  # copies to it wait for it, so the streams on which shards leave need no event
            wait_for({*ready.values()}, [receiving])
        tables = self._allocate_for_kernels()
        for at, (full, source) in enumerate(zip(self._buffers, sources, strict=True)):
            pieces, written = source.pieces(ready)
            try:
                self._pull(tables, at, pieces, written.items(), full.layout)
            finally:
                source.end_pull([] if receiving is None else [Event(receiving)])
        self._pull_event = None if receiving is None else Event(receiving)

    def _pull_pieces(self) -> bool:
        """Pulls the pieces of the slot's group (`UnitPieces`). Returns false if one is missing."""
        unit, receiving = self.unit, self.unit.streams.receiving[self.slot]
        pieces = unit.pieces.borrow(self.slot, unit.versions())
        if pieces is None:
            return False
        try:
            tables = self._allocate_for_kernels()
            members = zip(pieces[0].group, pieces, strict=True)
            written = [(unit.slots[member], piece.written) for member, piece in members if piece.written is not None]
            for at, layout in enumerate(pieces[0].layouts):
                self._pull(tables, at, [piece.flats[at] for piece in pieces], written, layout)
        finally:
            self._pull_event = None if receiving is None else Event(receiving)
            unit.pieces.give_back(self.slot, pieces, self._pull_event)
        return True

    def _allocate_for_kernels(self) -> PeerTables | None:
        """Gives the parameters memory of the current stream, which computes, if kernels pull into it.

        Graphs may keep this memory longer than the unit lives, and use it on the computing stream. Returns the tables
        of the kernels; another thread's call may end their use at any time.
        """
        receiving, tables = self.unit.streams.receiving[self.slot], self.unit.tables
        if tables is None or receiving is None:
            return None
        self._order_computing_streams()
        computing = current_streams([self.device])[self.device]
        for full in self._buffers:
            full.allocate()
        self._memory_stream = self._memory_stream or computing
        Event(computing).make_wait(receiving)  # earlier work there may still use this memory
        return tables

    def _pull(
        self,
        tables: PeerTables | None,
        at: int,
        pieces: Sequence[Tensor],
        written: Iterable[tuple[torch.device, Event]],
        layout: Layout,
    ) -> None:
        """Pulls the pieces of dtype number ``at``. ``written``: devices and events after the writes to pieces there."""
        receiving, streams = self.unit.streams.receiving[self.slot], self.unit.streams.pulling[self.slot]
        full = self._buffers[at]
        if tables is not None and receiving is not None:
            wait_for({event for _, event in written}, [receiving])  # most often one for all devices
            with streams_set({self.device: receiving}):
                full.pull_by(tables.gather(self.slot, at, layout), pieces, layout)
            return
        for device, event in written:
            event.make_wait(streams[device])
        with streams_set(streams), settings.held(self.unit.comm_settings):
            full.pull(pieces, self.slot % len(pieces), layout)

    @contextmanager
    def _naming_out_of_memory(self) -> Iterator[None]:
        """Wraps an allocation: if memory is short, frees the parameters and names the unit and the device."""
        try:
            with naming_out_of_memory("parameters", self.unit.name, self.device, self.unit.full_bytes):
                yield
        except torch.OutOfMemoryError:
            self.free()
            raise

    def make_full(self, ready: Mapping[torch.device, Event]) -> None:
        """Makes the parameters full. The current stream, which computes, waits for the gather."""
        with self._lock:
            self.start(ready)
            self._order_computing_streams()
            if not self.is_full:
                with stage("unshard", self.slot):
                    self._fill(ready)

    def _fill(self, ready: Mapping[torch.device, Event]) -> None:
        computing, receiving = current_streams([self.device]), self.unit.streams.receiving[self.slot]
        with torch.no_grad(), self._naming_out_of_memory():
            if self._sources:
                self._pull_from_owners(ready)
            if self._pull_event is not None:
                wait_for([self._pull_event], computing.values())
            if self._memory_stream is None:
                self._memory_stream = self._last_stream
                for full in self._buffers:
                    full.allocate()
            for full in self._buffers:
                gathered = full.fill()
                if receiving is not None and gathered is not None:
                    wait_for([Event(stream) for stream in computing.values()], [receiving])
                    if self._pull_event is not None:
                        hold([gathered], self._pull_event)  # other devices have written to it
                del gathered  # its memory belongs to the receiving stream
        self._pull_event = None
        self.is_full = True
        if not self._full_versions:
            self._full_versions, self._own_references = self._versions_of_full(), self._references()

    def use(self, ready: Mapping[torch.device, Event], module: Registries) -> None:
        """Makes the parameters full for a call of ``module``, and keeps them full until `end_use`."""
        with self._lock:
            self.make_full(ready)
            self.show_in(module)
            self._running_calls += 1
            self._is_as_after_backward = False

    def show_in(self, module: Registries) -> None:
        """Registers the parameters, which are full, in the replica of ``module`` until they are freed."""
        with self._lock:
            self._showing_modules.add(module)
            module.register(self.parameters)

    def end_use(self) -> None:
        """Ends `use`: a call of one of the unit's modules has ended."""
        with self._lock:
            self._running_calls -= 1

    def free(self) -> None:
        """Frees the parameters and drops a gather that has started, unless a call uses them."""
        with self._lock:
            if self._running_calls:
                return
            self._note_overwritten()
            used, home, keeps_memory = self._last_stream, self._memory_stream, len(self.unit.graphs) > 0
            if self.is_full and used is not None and home is not None and used != home:
                wait_for([Event(used)], [home])
            if home is not None and self._pull_event is not None:  # a kernel may be writing to it
                wait_for([self._pull_event], [home])
            for full in self._buffers:
                if full.gathered is not None and self._pull_event is not None:
                    hold([full.gathered[0]], self._pull_event)
                full.gathered = None  # its memory belongs to the receiving stream, which alone has used it
                full.free(keeps_memory)
            self._pull_event, self._sources = None, ()
            if not keeps_memory:
                self._memory_stream = None
            self.is_full = self.is_unsharded = self._is_as_after_backward = self._is_kept_for_graph = False
            for module in self._showing_modules:
                module.register(self.unit.parameters)
            self._showing_modules.clear()

    @property
    def flats(self) -> list[Tensor]:
        """For each dtype the memory of the parameters, as bytes."""
        return [full.flat for full in self._buffers]

    def copy_from(self, other: SlotUnit) -> None:
        """Copies the values of another slot, unless a gather has started. The computing streams are current."""
        with self._lock:
            if self.is_started:
                return
            self._order_computing_streams()
            with torch.no_grad(), self._naming_out_of_memory():
                for full, other_full in zip(self._buffers, other._buffers, strict=True):
                    full.allocate()
                    full.copy_from(other_full)
            self._versions = other._versions
            self._fill({})

    def drop_old_values(self) -> None:
        """Frees the full parameters if the sharded ones may have changed since. Counters miss some changes.

        So unchanged counters are trusted only inside the user's ``unshard()``, while a recorded graph is there, and,
        with ``reshard_after_backward=False``, from a backward to the next call. A running backward needs its values.
        """
        with self._lock:
            stays = self.is_unsharded or self._is_as_after_backward or self.is_in_backward or _torch.is_in_backward()
            stays |= self._is_kept_for_graph and self._is_read_by_graph()
            if self.is_started and not (stays and self._versions == self.unit.versions()):
                self.free()

    def unshard(self, ready: Mapping[torch.device, Event]) -> None:
        """Starts a gather for the user, as `start` does."""
        with self._lock:
            self.drop_old_values()
            self.start(ready)
            self.is_unsharded = True

    def take_overwritten(self) -> int | None:
        """Returns once the position of a full parameter that other code wrote to. All are freed: slots would differ."""
        with self._lock:
            self._note_overwritten()
            position, self._overwritten_position = self._overwritten_position, None
            if position is not None:
                self.free()
            return position

    def refuse_overwritten(self) -> None:
        """Raises if other code wrote to a full parameter. The write is lost."""
        if (position := self.take_overwritten()) is not None:
            self.unit.refuse_write(position)

    def _note_overwritten(self) -> None:
        if self.is_full and (versions := self._versions_of_full()) != self._full_versions:
            has_changed = [a != b for a, b in zip(versions, self._full_versions, strict=True)]
            self._overwritten_position, self._full_versions = has_changed.index(True), versions

    def _versions_of_full(self) -> list[int]:
        return [*map(_torch.version_of, self.parameters)]

    # ---- when to free ------------------------------------------------------------------------------------------------

    def note_module_end(self, number: int, has_backward: bool, is_announced: bool = True) -> None:
        """Frees the parameters if all of the unit's modules have run. With ``has_backward`` a graph may lead here.

        ``is_announced``: a hook on an output says when that backward begins; otherwise the parameters stay for it.
        """
        with self._lock:
            self._modules_run.add(number)
            if len(self._modules_run) < self.unit.number_of_modules:
                return
            self._modules_run.clear()
            if is_announced or not has_backward:
                self._free_after_forward(has_backward)

    def note_forward_end(self, has_failed: bool) -> None:
        """Frees what nobody needs after the forward of the whole tree."""
        with self._lock:
            was_incomplete = bool(self._modules_run)
            self._modules_run.clear()
            if self.is_in_backward:  # the forward is a recomputation
                return
            if has_failed or not self.is_full:
                self.free()  # drops a gather that was started ahead in vain
            elif was_incomplete:
                self._free_after_forward(has_backward=True)

    def _free_after_forward(self, has_backward: bool) -> None:
        unit, size = self.unit, self.unit.reshard_after_forward
        stays = size is False and (has_backward or not unit.is_reshard_automatic)
        if self.is_in_backward or self._is_kept_for_graph or stays:
            return
        if has_backward and not isinstance(size, bool):
            if not unit.has_group(self.slot, size):
                return
            if self.is_full and not self._running_calls:
                stream = self._last_stream
                streams = {} if stream is None else {self.device: stream}
                with self._naming_out_of_memory(), torch.no_grad(), streams_set(streams):
                    unit.pieces.keep(self.slot, size, self.parameters, self._versions, stream, unit.tables)
        self.free()

    def begin_backward(self, call: object, ends_with_gradients: bool) -> bool:
        """Notes that the backward of a call begins. Returns false if it has begun before, and the unit is full.

        It ends with `end_backward`, or if ``ends_with_gradients`` with the gradients of all parameters. Those that a
        checkpoint inside of the call brings in a pass of its own are not all.
        """
        with self._lock:
            if call in self._open_calls and self.is_full:
                return False
            self._has_all_gradients, self.is_in_backward = False, True
            self._open_calls[call] = _torch.current_graph_task_id() if ends_with_gradients else None
            return True

    def end_backward(self, call: object) -> None:
        """Notes that no node of a call is left to run, and frees the parameters if no other call needs them."""
        with self._lock:
            if call in self._open_calls:
                del self._open_calls[call]
                self._free_after_backward()

    def note_gradients(self) -> None:
        """Notes that all parameters have their gradients in this pass, and frees them if no node needs them."""
        with self._lock:
            task = _torch.current_graph_task_id()
            self._open_calls = {call: ends_in for call, ends_in in self._open_calls.items() if ends_in != task}
            self._has_all_gradients = True
            self._free_after_backward()

    def _free_after_backward(self) -> None:
        # With create_graph=True another backward may follow through this one's graph, whose nodes read the parameters.
        if self._is_kept_for_graph or torch.is_grad_enabled():
            return
        if not self._open_calls and (self._has_all_gradients or not self.unit.trainable):
            self.is_in_backward = False
            if self.unit.reshard_after_backward:
                self.free()

    def note_pass_end(self, has_failed: bool, was_recorded: bool) -> None:
        """Frees the parameters after a pass of backward, unless a pass through its recorded graph may follow."""
        with self._lock:
            self._open_calls.clear()
            self.is_in_backward, self._is_as_after_backward = False, True
            self.is_unsharded = False  # the gradients are those of the sharded parameters
            may_be_read = (was_recorded or self._is_kept_for_graph) and not has_failed
            self._is_kept_for_graph = may_be_read and self._is_read_by_graph()
            if self._is_kept_for_graph:
                return
            if has_failed or self.unit.reshard_after_backward:
                self.free()

    def _is_read_by_graph(self) -> bool:
        """True if a graph has saved a parameter, or a view of one."""
        return any(map(gt, self._references(), self._own_references))

    def _references(self) -> list[int]:
        return [*map(_torch.use_count, self.parameters), *(full.references for full in self._buffers)]

    def _order_computing_streams(self) -> None:
        """Makes the current stream wait for the computing stream that used the parameters last, if it is another."""
        current = current_streams([self.device]).get(self.device)
        if self._last_stream is not None and current is not None and current != self._last_stream:
            Event(self._last_stream).make_wait(current)
        self._last_stream = current
