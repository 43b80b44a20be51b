"""`ShardedUnit` is the parameters that one ``fully_shard`` gathers and frees together, where their owners have them.

An owner's *flat shard* holds its shard of each parameter. The flat shards of all owners are the rows of the *gathered*
matrix, where a parameter is a range of columns. A *full* buffer holds the parameters themselves, each contiguous:
`Layout` says where. `PeerTables` has the tables by which kernels that read peers gather parameters and sum gradients.
The layout of per-parameter sharding follows FSDP2 (``torch.distributed.fsdp.fully_shard``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm import settings
from dataparallel.comm.host import can_pin
from dataparallel.comm.kernels import ADDRESSES, SUM_KERNELS, DeviceTable
from dataparallel.comm.streams.current import Event, current_streams, kept_stream
from dataparallel.comm.tables import Part, all_gather, reduce_scatter
from dataparallel.devices import CPU
from dataparallel.sharded.order import note_host_reads
from dataparallel.sharded.placements import Shard, shard_shapes
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.weak_members import WeakMembers

if TYPE_CHECKING:
    from dataparallel.machines.arguments import MachineMesh
    from dataparallel.machines.lanes import Lane


_ALIGNED_TO = 8
"""Elements. A part begins at a multiple, so that kernels can read 16 bytes at a time also in 16-bit types."""


@dataclass(frozen=True)
class Columns:
    """One parameter's range of columns: ``numel`` from ``start`` on, and ``padding`` more that belong to no parameter.

    ``dim``: the dimension along which it is cut. ``shard_shapes``: the shape of each owner's part, without padding.
    """

    shape: torch.Size
    dim: int
    shard_shapes: tuple[torch.Size, ...]
    start: int
    numel: int
    padding: int

    @cached_property
    def is_even(self) -> bool:
        """True if all owners have parts of one size, which fill their columns."""
        return all(part.numel() == self.numel for part in self.shard_shapes)


class Layout:
    """The layout of parameters of one dtype over some owners.

    Each part takes the columns of ``ceil(rows / owners)`` rows of its parameter, even if it has fewer rows, so all flat
    shards have one size. Over machines the rows of all owners with one number follow each other, as one piece.

    Args:
        shapes, placements: of the parameters.
        owners: how many owners each of the ``machines`` has. This machine is number ``machine``.
        full_offsets: where each parameter begins in a full buffer, if that was laid out for a multiple of ``owners``.

    Attributes:
        numel: the columns of the gathered matrix, which are the elements of a flat shard.
        owners: the rows of the matrix: all owners on all machines. A full buffer has ``owners * numel`` elements.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        placements: Sequence[Shard],
        owners: int,
        full_offsets: Sequence[int] | None = None,
        machines: int = 1,
        machine: int = 0,
    ) -> None:
        rows_here = range(machine, owners * machines, machines)
        owners *= machines
        self.owners, self.numel = owners, 0
        self.columns: list[Columns] = []
        for shape, placement in zip(shapes, placements, strict=True):
            parts = shard_shapes(shape, placement, owners)
            numel = parts[0].numel()
            padding = -numel % _ALIGNED_TO
            self.columns.append(Columns(shape, placement.dim, tuple(parts), self.numel, numel, padding))
            self.numel += numel + padding
        self._views = [
            [(each.shard_shapes[owner], contiguous(each.shard_shapes[owner]), each.start) for each in self.columns]
            for owner in rows_here
        ]
        self.full_offsets = [owners * p.start for p in self.columns] if full_offsets is None else [*full_offsets]
        # In a full buffer: where the columns of each parameter, and of its padding, begin, and how many they are.
        self._blocks: list[tuple[int, int]] = []
        for columns, start in zip(self.columns, self.full_offsets, strict=True):
            self._blocks += [(start, columns.numel)] if columns.numel else []
            self._blocks += [(start + owners * columns.numel, columns.padding)] if columns.padding else []

    @cached_property
    def parts(self) -> list[Part]:
        """How the parameters are cut, for the plans of ``comm.tables``."""
        return [
            Part(columns.start, in_full, tuple(shape.numel() for shape in columns.shard_shapes))
            for columns, in_full in zip(self.columns, self.full_offsets, strict=True)
        ]

    def parts_of(self, flat: Tensor, owner: int) -> list[Tensor]:
        """Returns an owner's part of each parameter, as views of its flat shard. The owner is on this machine."""
        offset = flat.storage_offset()
        # One operator for each view, because backward makes one of every gradient at every owner.
        return [flat.as_strided(size, stride, offset + start) for size, stride, start in self._views[owner]]

    def pack(self, flat: Tensor, parts: Sequence[Tensor], owner: int) -> None:
        for view, part in zip(self.parts_of(flat, owner), parts, strict=True):
            view.copy_(part)

    def copy_out(self, gathered: Tensor, full: Tensor) -> None:
        """Copies the gathered matrix into the full buffer of a slot."""
        offset = full.storage_offset()
        targets = [full.as_strided((self.owners, size), (size, 1), offset + start) for start, size in self._blocks]
        torch.split_with_sizes_copy(gathered, [size for _, size in self._blocks], dim=1, out=targets)
        self.join_parts(full)

    def join_parts(self, full: Tensor) -> None:
        """Joins the parts of parameters that are cut along another dimension than 0, which follow each other."""
        for columns, start in zip(self.columns, self.full_offsets, strict=True):
            if columns.dim:
                region = full[start : start + prod(columns.shape)]
                parts = region.clone().view(self.owners, *columns.shard_shapes[0])
                torch.cat([*parts], columns.dim, out=region.view(columns.shape))

    def copy_in(self, grads: Sequence[Tensor | None], gathered: Tensor) -> None:
        """Copies gradients of full parameters into the gathered matrix by one operator, which casts too.

        Zeros stand for missing ones. On CUDA it is one kernel if the gradients are contiguous.
        """
        like = next((grad for grad in grads if grad is not None), None)
        if like is None:
            gathered.zero_()
            return
        rows: list[Tensor] = []
        zeros: dict[int, Tensor] = {}  # by their number of columns, because parameters share them
        for grad, columns in zip(grads, self.columns, strict=True):
            for numel, values in ((columns.numel, grad), (columns.padding, None)):
                if numel and values is not None:
                    rows.append(self._rows_of(values, columns))
                elif numel:
                    if numel not in zeros:
                        zeros[numel] = like.new_zeros(self.owners, numel)
                    rows.append(zeros[numel])
        if rows:  # else all parameters are empty
            _torch.chunk_cat(rows, 0, self.owners, out=gathered)

    def _rows_of(self, grad: Tensor, columns: Columns) -> Tensor:
        """Returns a gradient as a matrix: a row for each owner if the parts are even, else for each row of its own."""
        if columns.dim:
            grad = torch.stack(grad.chunk(self.owners, columns.dim))
        return grad.reshape(self.owners if columns.is_even else len(grad) if grad.dim() else 1, -1)


DtypeGroup: TypeAlias = "tuple[list[int], Layout, torch.dtype]"
"""Parameters of one dtype: their positions in the unit, their layout, the dtype."""


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    return tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class Precision:
    """The dtypes of a unit. ``None`` means the dtype of the parameters, and for sums the dtype of the gradients."""

    parameters: torch.dtype | None = None
    sums: torch.dtype | None = None
    outputs: torch.dtype | None = None
    casts_inputs: bool = True

    def on_slots(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the full parameters for sharded parameters of ``dtype``."""
        return self.parameters or dtype if dtype.is_floating_point else dtype

    def of_sums(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which slots deliver gradients of parameters of ``dtype``."""
        return self.sums or self.on_slots(dtype) if dtype.is_floating_point else dtype

    def of_inputs(self, arguments: Any) -> Any:
        """Returns the arguments of a call, cast if they are to be."""
        return _cast(arguments, self.parameters) if self.casts_inputs else arguments

    def of_outputs(self, output: Any) -> Any:
        """Returns the output of a call, cast if it is to be."""
        return _cast(output, self.outputs)


def _cast(structure: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return structure
    return _torch.pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, structure)


def added_in(summed: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the sum, which has 32 bits for 16-bit numbers."""
    wide = torch.promote_types(summed, dtype)
    return torch.float32 if wide.itemsize < 4 and wide.is_floating_point else wide


@contextmanager
def naming_out_of_memory(what: str, unit: str, device: torch.device, number_of_bytes: int) -> Iterator[None]:
    """Wraps allocations: if memory is short, says that ``device`` has no room for ``what`` of a unit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{device} has no room for the {number_of_bytes:,} bytes of {what} of the unit {unit!r}: shard smaller "
            f"units, prefetch less, or use more devices. {error}"
        ) from error


Gradients: TypeAlias = "Tensor | Sequence[Tensor | None]"
"""What a slot delivers for parameters of one dtype. Most often kernels add the gradients where autograd left them.

Otherwise they are packed into a matrix in the layout of the gathered one, with a row for each owner on this machine.
Over machines a row has the parts of this owner on every machine. Without anything it is an empty tuple.
"""


class PeerTables:
    """The tables of one unit, on the devices that launch them. Those of gathers are copied there, on current streams.

    A slot pulls its full parameters straight from the owners' shards by one launch. An owner sums its rows straight
    from where autograd left the gradients, by one launch too. Without such kernels pieces are packed and copied.

    ``summed``: for each dtype of parameters that need gradients, the dtype of gradients that kernels add where they
    lie; ``None`` if they add none.
    """

    def __init__(self, unit: ShardedUnit) -> None:
        self._slots, self._precision, self._groups = unit.slots, unit.precision, unit.groups
        self._dtypes = [unit.precision.on_slots(owned.dtype) for owned in unit.owned]
        self._gathers: dict[tuple[int, int, int], DeviceTable] = {}
        for slot in range(len(unit.slots)):
            for at, owned in enumerate(unit.owned):
                self.gather(slot, at, owned.layout)
        # For each dtype and owner the launches: which parameters, and the table.
        self._sums: dict[tuple[int, int, torch.dtype], list[tuple[slice, DeviceTable]]] = {}
        self.summed = [self._dtype_summed(dtype) for _, _, dtype in unit.groups]

    def _dtype_summed(self, dtype: torch.dtype) -> torch.dtype | None:
        """Returns the dtype in which gradients come if the sum only widens it, else the one in which slots deliver."""
        delivered, come = self._precision.of_sums(dtype), self._precision.on_slots(dtype)
        are_widened = torch.promote_types(come, delivered) == delivered
        may_be = [each for each in (come, delivered) if each == delivered or are_widened]
        return next((each for each in may_be if (each, added_in(delivered, dtype)) in SUM_KERNELS), None)

    def gather(self, slot: int, at: int, layout: Layout) -> DeviceTable:
        """Returns the table for dtype number ``at`` by which a slot pulls the pieces of a layout into its full buffer.

        A table for pieces of a group of slots is made when it is first asked for, on the slot's current stream.
        """
        key = slot, at, layout.owners
        if key not in self._gathers:
            plan = all_gather(layout.parts, slot % layout.owners)
            self._gathers[key] = DeviceTable(plan, self._slots[slot], self._dtypes[at])
        return self._gathers[key]

    def _sums_of(self, at: int, owner: int, summed: torch.dtype) -> list[tuple[slice, DeviceTable]]:
        """Returns the tables for an owner's sums of gradients of a dtype, made on the current stream of its device."""
        key = at, owner, summed
        if key not in self._sums:
            _, layout, dtype = self._groups[at]
            at_once = (ADDRESSES - 2) // len(self._slots)  # parameters of one launch
            target = added_in(self._precision.of_sums(dtype), dtype)
            self._sums[key] = []
            for first in range(0, len(layout.parts), at_once):
                which = slice(first, first + at_once)
                plan = reduce_scatter(layout.parts[which], owner, len(self._slots))
                self._sums[key].append((which, DeviceTable(plan, self._slots[owner], summed, target)))
        return self._sums[key]

    def reduce_scatter(self, unit: str, at: int, delivered: Sequence[Gradients], totals: Sequence[Tensor]) -> None:
        """Adds each owner's rows of what the slots have delivered into its total, on the current streams.

        ``delivered``: of each slot. Where no slot has a gradient, totals stay as they are.
        """
        layout = self._groups[at][1]
        dtypes = {each.dtype if isinstance(each, Tensor) else self.summed[at] for each in delivered if len(each)}
        if len(dtypes) > 1:
            raise RuntimeError(
                f"some slots hold gradients of the unit {unit!r} since before this backward, and others do "
                "not know: call set_requires_gradient_sync() between passes of backward, not inside of one"
            )
        dtype = next(iter(dtypes), None)
        if dtype is None:
            return
        of_owners = [self._sums_of(at, owner, dtype) for owner in range(len(totals))]
        has_matrices = any(isinstance(each, Tensor) for each in delivered)
        for of_parameters in zip(*of_owners, strict=True):  # the same ones, for each owner
            which = of_parameters[0][0]
            parts = layout.parts[which]
            terms: list[Tensor | None] = []
            for each in delivered:
                some = [each] * len(parts) if isinstance(each, Tensor) else each[which]
                terms += some or [None] * len(parts)  # a slot may have delivered nothing
            for owner, ((_, table), total) in enumerate(zip(of_parameters, totals, strict=True)):
                if not has_matrices:
                    table.launch([*terms, total])
                    continue
                # In a matrix the owner's rows of all parameters follow each other.
                rows = [owner * layout.numel + part.in_shard - sum(part.counts[:owner]) for part in parts]
                shifts = [row if isinstance(each, Tensor) else 0 for each in delivered for row in rows]
                table.launch([*terms, total], [*shifts, 0])


class TreeStreams:
    """The side streams of a tree on the devices of its slots. On the CPU there are none.

    A copy between devices orders the current streams of both: the sending one waits for the receiving one before the
    copy, which waits for the sending one after it. So an event on the receiving stream comes after all earlier pulls.

    Attributes:
        receiving: for each slot the stream on its device on which its pulls end. It owns the matrix that is received.
        pulling: for each slot the streams that are current while it pulls: the receiving one on its own device, and on
            each other owner a stream on which shards leave.
        adding: for each device the stream on which gradients arrive, are summed, and leave.
        casting: for each device the stream on which shards are cast or sent before slots pull them.
        last_casts: for each device an event after the tree's last casts there. Before it no stream may write to shards,
            and while one in pinned memory is sent, neither may the host.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self.slots = list(slots)
        self.receiving = [_kept(device, "gathers", i) for i, device in enumerate(slots)]
        self.adding = self._on_each("sums")
        self.casting = self._on_each("shards are cast")
        self.last_casts: dict[torch.device, Event] = {}
        self._noting_casts = threading.Lock()
        self.pulling: list[Mapping[torch.device, torch.Stream]] = []
        for slot, (device, stream) in enumerate(zip(slots, self.receiving, strict=True)):
            # Only one stream of a device can be current.
            self.pulling.append(self._on_each("shards leave", slot) | ({} if stream is None else {device: stream}))

    def _on_each(self, purpose: str, number: int = 0) -> dict[torch.device, torch.Stream]:
        return {d: stream for d in {*self.slots} if (stream := _kept(d, purpose, number)) is not None}

    def meet(self, purpose: str, events: Iterable[Event]) -> Event | None:
        """Returns one event after all ``events`` and earlier ones of the same purpose; ``None`` on the CPU."""
        stream = _kept(self.slots[0], f"{purpose} meet")
        if stream is None:
            return None
        wait_for(events, [stream])
        return Event(stream)

    def note_casts(self) -> dict[torch.device, Event]:
        """Returns an event after the casts on each device so far, and keeps these as `last_casts`."""
        with self._noting_casts:  # slots cast at the same time, and events recorded before must not be kept instead
            self.last_casts = {device: Event(stream) for device, stream in self.casting.items()}
            return self.last_casts

    def make_owners_wait(self, computing: Mapping[torch.device, torch.Stream], is_offloaded: bool) -> None:
        """Orders later writes to the shards, by these streams and by the host, after all pulls and casts of shards."""
        casts = [*self.last_casts.values()]
        pulls = [Event(stream) for stream in self.receiving if stream is not None]  # after those launched so far
        after_reads = self.meet("pulls", [*casts, *pulls])
        wait_for([] if after_reads is None else [after_reads], computing.values())
        if is_offloaded:
            note_host_reads(casts)


def wait_for(events: Iterable[Event], streams: Iterable[torch.Stream]) -> None:
    streams = [*streams]
    for event in events:
        for stream in streams:
            event.make_wait(stream)


def _kept(device: torch.device, purpose: str, number: int = 0) -> torch.Stream | None:
    return None if device == CPU else kept_stream(device, purpose, number)


class OwnedShards:
    """The shards of a unit's parameters of one dtype, in one flat shard for each owner (``flats``).

    Other code may give a parameter other memory: ``load_state_dict(assign=True)``, ``model.half()``, ``to_empty``. Then
    the shards are packed again before the next call.

    Attributes:
        positions: of the parameters in the unit.
        shapes, cuts: of the parameters, which are whole, and along which dimension they are cut.
        layout: of the flat shards of all owners, on all machines.
    """

    def __init__(self, unit: ShardedUnit, positions: Sequence[int]) -> None:
        self.parameters, self.owners = [unit.parameters[i] for i in positions], unit.slots
        self.positions, self._pin, self.dtype = positions, unit.pin, self.parameters[0].dtype
        self.shapes, self.cuts = [p.shape for p in self.parameters], [cut_of(p) for p in self.parameters]
        self.layout = Layout(self.shapes, self.cuts, len(self.owners), None, *unit.sharded_over)
        self.flats: list[Tensor] = []
        self._packed: list[tuple[Tensor, ...]] = []  # each parameter's shards as `pack` has made them
        self._addresses: list[list[int]] = []  # of these
        self._number_of_packs = 0
        self.pack()

    @property
    def are_on_meta(self) -> bool:
        return any(parameter._shards[0].is_meta for parameter in self.parameters)

    def off_host(self) -> torch.device | None:
        """Returns the device of a shard that is not in host memory; ``None`` if all shards are."""
        return next((s.device for p in self.parameters for s in p._shards if s.device != CPU), None)

    def is_stale(self) -> bool:
        """True if a parameter's shards are not the views that `pack` has made."""
        # Other code replaces all shards of a parameter at once, so most often the comparison of the tuples is enough.
        return any(
            parameter._shards is not packed and addresses != [shard.data_ptr() for shard in parameter._shards]
            for parameter, packed, addresses in zip(self.parameters, self._packed, self._addresses, strict=True)
        )

    def versions(self) -> list[int]:
        """Returns numbers that change with the values, also if these are written through ``data`` or ``shards``."""
        return [self._number_of_packs, *map(_torch.version_of, self.flats)]

    @torch.no_grad()
    def pack(self) -> None:
        """Copies the shards into new flat ones, one for each owner, and makes them views of these."""
        self.flats, self._number_of_packs = [], self._number_of_packs + 1
        if not self.are_on_meta:
            with torch.inference_mode(False):  # the shards outlive the block that the call may be in
                for owner in range(len(self.owners)):
                    parts = [parameter._shards[owner] for parameter in self.parameters]
                    flat = torch.zeros(self.layout.numel, dtype=self.dtype, device=parts[0].device)
                    if self._pin and flat.device == CPU and can_pin(self.owners[owner].type):
                        flat = flat.pin_memory()
                    self.layout.pack(flat, parts, owner)
                    self.flats.append(flat)
                    # The current stream comes after all calls that have read the former shards on other streams.
                    for stream in current_streams([flat.device]).values():
                        for part in parts:
                            part.record_stream(stream)
                views = [self.layout.parts_of(flat, owner) for owner, flat in enumerate(self.flats)]
            for i, parameter in enumerate(self.parameters):
                parameter._shards = tuple(of_owner[i] for of_owner in views)
        self._packed = [parameter._shards for parameter in self.parameters]
        self._addresses = [[shard.data_ptr() for shard in shards] for shards in self._packed]


def cut_of(parameter: ShardedTensor) -> Shard:
    """Returns the placement of a unit's parameter, which is never replicated."""
    placement = parameter.placement
    assert isinstance(placement, Shard)
    return placement


class Registries:
    """Where the parameters of a unit are registered: in the user's modules, or in a replica.

    ``entries``: the ``_parameters`` of a module, the name there, the position in the unit.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[dict[str, Any], str, int]] = []

    def register(self, parameters: Sequence[Tensor]) -> None:
        """Registers ``parameters``, the sharded or the full ones, in the unit's order."""
        for registry, name, position in self.entries:
            registry[name] = parameters[position]


class ShardedUnit:
    """The parameters of one unit at their owners. `tree.Unit` is the same with the slots that gather them.

    A unit may belong to several trees, one after the other. Its calls use what is of the last one. A user may change
    settings at any time: these are the attributes with a default.

    Attributes:
        reshard_after_forward: free the parameters after forward (``True``), keep them (``False``), or shard them over
            groups of so many slots until backward (a number).
        is_reshard_automatic: the user has not set ``reshard_after_forward``.
        reshard_after_backward: free the parameters after backward.
        requires_gradient_sync: sum the gradients of all slots in backward; otherwise they stay on the slots.
        requires_all_reduce: sum gradients over the machines that have the same shards; otherwise partial sums wait.
        gradient_divide_factor: sums are divided by it.
        unshard_in_backward: gather this unit before its backward.
        registries: where the parameters are registered in the user's modules.
        settle: waits until the tree of the last call runs no pass of backward.
        join_pass: returns the running pass of backward of that tree: `Tree.join_pass`.
        owned: for each dtype its parameters, and their flat shards.
        groups: for each dtype the parameters that need gradients, and their layout.
        trainable: positions of the parameters that need gradients.
        comm_settings: those of the last call. Its backward may run in threads without the caller's settings.
        tables: the tables of the unit if kernels serve it in this call.
        graphs: captured graphs of all trees of the unit, which read full parameters where they are.
    """

    reshard_after_forward: bool | int = True
    is_reshard_automatic: bool = False
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    gradient_divide_factor: float = 1.0
    unshard_in_backward: bool = True
    all_reduce_hook: Callable[[Tensor], None] | None = None
    post_optim_event: torch.Event | Sequence[torch.Event] | None = None

    def __init__(
        self,
        name: str,
        parameters: Sequence[ShardedTensor],
        slots: Sequence[torch.device],
        precision: Precision,
        *,
        is_offloaded: bool = False,
        pin: bool = False,
        machines: MachineMesh | None = None,
    ) -> None:
        self.name, self.slots, self.precision = name, list(slots), precision
        self.is_offloaded, self.pin, self.machines = is_offloaded, pin, machines
        self.graphs: WeakMembers[Any] = WeakMembers()
        self.parameters = list(parameters)
        self.number_of_modules = 1
        self.settle: Callable[[], None] = lambda: None
        self.join_pass: Callable[..., Any] | None = None
        self.registries = Registries()
        self.streams = TreeStreams(self.slots)
        # Held while the unit adapts to its parameters: several threads may make the first call after a change.
        self._making = threading.Lock()
        self._make_owned()

    def _make_owned(self) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            by_dtype.setdefault(parameter.dtype, []).append(i)
        self.owned = [OwnedShards(self, positions) for positions in by_dtype.values()]
        # As a call or a pass began. Until it ends, no parameter may change.
        self.noted_versions: list[int] | None = None
        self._had_no_values = any(owned.are_on_meta for owned in self.owned)
        self._parameter_flags = self._present_flags()
        self.trainable = [i for i, parameter in enumerate(self.parameters) if parameter.requires_grad]
        self.groups: list[DtypeGroup] = []
        for owned in self.owned:
            if kept := [i for i in owned.positions if self.parameters[i].requires_grad]:
                shapes, cuts = [self.parameters[i].shape for i in kept], [cut_of(self.parameters[i]) for i in kept]
                self.groups.append((kept, Layout(shapes, cuts, len(self.slots), None, *self.sharded_over), owned.dtype))
        self.comm_settings = settings.current()
        self.tables: PeerTables | None = None
        self._made_tables: PeerTables | None = None

    def _present_flags(self) -> list[Any]:
        return [(id(p), p.dtype, p.requires_grad) for p in self.parameters]

    @property
    def full_bytes(self) -> int:
        """The bytes of the full parameters on one slot, with padding."""
        return sum(
            owned.layout.owners * owned.layout.numel * self.precision.on_slots(owned.dtype).itemsize
            for owned in self.owned
        )

    @property
    def gathers(self) -> Lane | None:
        """The lane of gathers over machines, if parameters are sharded over them."""
        return None if self.machines is None else self.machines.gathers

    @property
    def sharded_over(self) -> tuple[int, int]:
        """How many machines the parameters are sharded over, and the number of this machine among them."""
        return (1, 0) if self.machines is None else (self.machines.shard_size, self.machines.shard_rank)

    def to_host(self, part: Tensor) -> Tensor:
        """Returns a copy in host memory, which the current stream completes."""
        if part.device == CPU:
            return part
        pinned = self.pin and can_pin(part.device.type)
        host = torch.empty(part.shape, dtype=part.dtype, device=CPU, pin_memory=pinned)
        return host.copy_(part, non_blocking=pinned)

    def versions(self) -> list[int]:
        """Returns numbers that change with the values of the parameters. A call or pass keeps its first ones.

        Writes that torch does not see, such as those of ``shard.data``, change none.
        """
        noted = self.noted_versions  # read once: a call of another thread may end now
        if noted is not None:
            return noted
        versions = [*map(_torch.version_of, self.parameters)]  # not moved by writes through `data` or `shards`
        for owned in self.owned:
            versions += owned.versions()
        return versions

    def refuse_changed(self, versions: list[int]) -> None:
        """Raises if a parameter has changed since a forward, in which `versions` returned these."""
        if self.versions() != versions:
            raise RuntimeError(
                f"a parameter of the unit {self.name!r} was changed in place between forward and backward, "
                "which needs its former values. Step the optimizer after backward"
            )

    def refuse_write(self, position: int) -> NoReturn:
        """Raises because other code wrote to the full parameter at this position."""
        name = next(name for _, name, at in self.registries.entries if at == position)
        raise RuntimeError(
            f"{name!r} in the unit {self.name!r} was changed in place while it was full. The full parameter is a "
            "copy, so the change would be lost. Change the sharded one, which the module has after reshard(). If "
            "forward changes it, use replicate. An Embedding with max_norm does: leave max_norm out, and after "
            "each step call shard.renorm_(norm_type, 0, max_norm) for each shard of weight.shards, in no_grad()"
        )
