"""``comm`` as autograd functions: Broadcast, ReduceAdd, ReduceAddCoalesced, Scatter, Gather.

Each is one node whose backward is another of them, so all are twice differentiable; with one node for all
devices, a backward pass reaches every device at once instead of one after the other. Gradients are ``None`` where
every slot's gradient is ``None``, else the sum, in slot order, of those that there are. Nested structures are
``scatter_gather``'s business, modules ``replicate``'s.

Their forwards note the streams that are current on all of their devices, and a backward runs on these: see
``streams.nodes``.

Inside a backward that is not itself recorded the plain functions of ``comm`` are called: they hand one tensor to
several places as the same object, from which torch sees that it must not be kept as anybody's ``.grad``.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dataparallel import _torch, comm
from dataparallel.comm import settings
from dataparallel.comm.buckets import Planned
from dataparallel.comm.copies import alias
from dataparallel.comm.transport import Travelling
from dataparallel.devices import CPU, DeviceLike, resolve_each
from dataparallel.profiling import stage
from dataparallel.streams.nodes import note_streams, on_streams_of

__all__ = [
    "Broadcast",
    "Gather",
    "ReduceAdd",
    "ReduceAddCoalesced",
    "Scatter",
    "copies_for_slots",
    "run_when_nothing_else_is_ready",
    "sum_as_soon_as_ready",
    "sums_over_slots",
]

_ONE_BUFFER = sys.maxsize
"""Tensors of one call, and one dtype, travel as one flat buffer; callers with many make calls of a bucket each."""


def sum_as_soon_as_ready(node: Any) -> None:
    """Has the engine run the node as soon as its gradients are there, before other nodes that are ready too.

    Of these the engine takes the one with the highest number, and numbers fall from the last layer to the first; only
    ``AccumulateGrad`` has a higher one than this. Without such numbers only the order changes: sums come last.
    """
    _torch.set_sequence_nr(node, 2**62)


def run_when_nothing_else_is_ready(node: Any) -> None:
    """Has the engine's thread for the node's device run all other nodes first that are ready there.

    So a backward that computes on the device goes on without it to its end: each of its nodes makes the next one ready.
    """
    _torch.set_sequence_nr(node, 0)


class Broadcast(Function):
    """``Broadcast.apply(devices, *tensors)``: the tensors on every slot, as one flat tuple, slot by slot.

    On the device where a tensor is already the result shares its memory, but for isolated slots other than the first.
    Backward sums over the slots, as soon as the last gradient is there.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[DeviceLike], *tensors: Tensor) -> tuple[Tensor, ...]:
        slots = resolve_each(devices)
        ctx.set_materialize_grads(False)
        ctx.slots = slots
        ctx.settings = settings.current()  # backward may run in a thread that knows nothing of the caller's
        ctx.sources = [tensor.device for tensor in tensors]
        note_streams(ctx, ctx.sources, slots)
        sum_as_soon_as_ready(ctx)
        outputs = copies_for_slots(tensors, slots)
        constant = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if not needed]
        ctx.mark_non_differentiable(*(on_slot[i] for on_slot in outputs for i in constant))
        return tuple(chain.from_iterable(outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        count = len(ctx.sources)
        with on_streams_of(ctx, grads):
            of_slots = [grads[k : k + count] for k in range(0, len(grads), count)]
            sums: list[Tensor | None] = [None] * count
            with stage("reduce_add"), settings.held(ctx.settings):
                for source in dict.fromkeys(ctx.sources):
                    indices = [i for i in range(count) if ctx.needs_input_grad[1 + i] and ctx.sources[i] == source]
                    totals = sums_over_slots([[of_slot[i] for i in indices] for of_slot in of_slots], source)
                    for i, total in zip(indices, totals, strict=True):
                        sums[i] = total
            return (None, *sums)


@torch.no_grad()
def copies_for_slots(
    tensors: Sequence[Tensor], slots: Sequence[torch.device], planned: Planned | None = None
) -> list[list[Tensor]]:
    """The tensors on every slot, as outputs for a node; none is the same object as a source or as another slot's.

    ``planned``: what `plan_buckets` has made of them as one bucket, where that is known.
    """
    copies = comm.broadcast_coalesced(tensors, slots, _ONE_BUFFER, planned=planned)
    already_there = {tensor.device for tensor in tensors}
    for slot, device in enumerate(slots):
        if device in slots[:slot]:
            copies[slot] = [alias(copy, slot) for copy in copies[slot]]
        elif device in already_there:
            copies[slot] = [
                alias(copy, slot) if copy is tensor else copy
                for copy, tensor in zip(copies[slot], tensors, strict=True)
            ]
    return copies


def sums_over_slots(
    of_slots: Sequence[Sequence[Tensor | None]], destination: torch.device, travelling: Travelling | None = None
) -> list[Tensor | None]:
    """For each position the sum over slots, ``None`` where every slot has ``None``; recorded if gradients are.

    Those that are present on the same slots travel together. ``travelling``: see `comm.reduce_add_coalesced`.
    """
    groups: dict[tuple[bool, ...], list[int]] = defaultdict(list)
    for i, of_tensor in enumerate(zip(*of_slots, strict=True)):
        groups[tuple([grad is not None for grad in of_tensor])].append(i)
    sums: list[Tensor | None] = [None] * len(of_slots[0])
    for present, indices in groups.items():
        inputs: Any = [[of_slot[i] for i in indices] for of_slot in compress(of_slots, present)]
        if not inputs:
            continue
        if torch.is_grad_enabled():
            totals = ReduceAddCoalesced.apply(destination, len(indices), *chain.from_iterable(inputs))
        else:
            totals = comm.reduce_add_coalesced(inputs, destination, _ONE_BUFFER, travelling=travelling)
        for i, total in zip(indices, totals, strict=True):
            sums[i] = total
    return sums


class ReduceAddCoalesced(Function):
    """``ReduceAddCoalesced.apply(destination, count, *tensors)``: ``count`` sums over the slots.

    ``tensors`` lists ``count`` tensors of the first slot, then those of the second, and so on. Backward broadcasts.
    """

    @staticmethod
    def forward(ctx: Any, destination: DeviceLike, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        if count < 1 or len(tensors) % count:
            raise ValueError(f"{len(tensors)} tensors cannot be {count} for each slot")
        ctx.set_materialize_grads(False)
        ctx.count, ctx.settings = count, settings.current()
        ctx.slots = [tensors[k].device for k in range(0, len(tensors), count)]
        inputs = [tensors[k : k + count] for k in range(0, len(tensors), count)]
        totals = comm.reduce_add_coalesced(inputs, destination, _ONE_BUFFER)
        note_streams(ctx, ctx.slots, [totals[0].device])
        return tuple(alias(t, 0) if len(inputs) == 1 else t for t in totals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        results: list[Tensor | None] = [None] * (len(ctx.slots) * ctx.count)
        if present:
            with on_streams_of(ctx, grads):
                for k, on_slot in enumerate(_spread(ctx, [grads[i] for i in present])):
                    for i, grad in zip(present, on_slot, strict=True):
                        results[k * ctx.count + i] = grad
        return (None, None, *results)


def _spread(ctx: Any, tensors: list[Tensor | None]) -> list[Sequence[Tensor]]:
    with settings.held(ctx.settings):
        if torch.is_grad_enabled():
            flat = Broadcast.apply(ctx.slots, *tensors)
            return [flat[k : k + len(tensors)] for k in range(0, len(flat), len(tensors))]
        return comm.broadcast_coalesced(tensors, ctx.slots, _ONE_BUFFER)  # type: ignore[arg-type, return-value]


class ReduceAdd(Function):
    """``ReduceAdd.apply(destination, *tensors)``: their sum, in the order given. Backward broadcasts.

    Raises ``ValueError`` where shapes or dtypes differ, and says which.
    """

    @staticmethod
    def forward(ctx: Any, destination: DeviceLike, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.slots, ctx.settings = [tensor.device for tensor in tensors], settings.current()
        total = comm.reduce_add(tensors, destination)
        note_streams(ctx, ctx.slots, [total.device])
        return alias(total, 0) if len(tensors) == 1 else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (1 + len(ctx.slots))
        with on_streams_of(ctx, [grad]):
            return (None, *(on_slot[0] for on_slot in _spread(ctx, [grad])))


class Scatter(Function):
    """``Scatter.apply(devices, chunk_sizes, dim, tensor)``: consecutive chunks, one for each slot.

    ``chunk_sizes`` may be ``None`` for near-equal ones. Chunks that need not move share the tensor's memory.
    Backward gathers; a slot without a gradient counts as zeros unless none has one.
    """

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[DeviceLike], chunk_sizes: Sequence[int] | None, dim: int, tensor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Aliases: a view made here could not be changed in place by the code that receives it.
        chunks = tuple(alias(part, k) for k, part in enumerate(comm.scatter(tensor, devices, chunk_sizes, dim)))
        ctx.source, ctx.dim, ctx.settings = tensor.device, dim, settings.current()
        note_streams(ctx, [tensor.device], [chunk.device for chunk in chunks])
        ctx.chunks = [(chunk.shape, chunk.dtype, chunk.device) for chunk in chunks]
        return chunks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return None, None, None, None
        with on_streams_of(ctx, grads), settings.held(ctx.settings):
            whole = [
                torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
                for grad, (shape, dtype, device) in zip(grads, ctx.chunks, strict=True)
            ]
            if not all(grad.is_sparse for grad in whole):
                whole = [grad.to_dense() if grad.is_sparse else grad for grad in whole]
            if torch.is_grad_enabled():
                return None, None, None, Gather.apply(ctx.source, ctx.dim, *whole)
            return None, None, None, comm.gather(whole, ctx.dim, ctx.source)


class Gather(Function):
    """``Gather.apply(destination, dim, *tensors)``: the tensors one after the other along ``dim``.

    0-dim tensors become a vector, whatever ``dim`` is. Backward scatters, to every device from this one node.
    """

    @staticmethod
    def forward(ctx: Any, destination: DeviceLike, dim: int, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.scalars = all(tensor.dim() == 0 for tensor in tensors)
        if ctx.scalars:
            dim, tensors = 0, tuple(tensor.reshape(1) for tensor in tensors)
        ctx.slots = [tensor.device for tensor in tensors]
        ctx.dim, ctx.settings = dim, settings.current()
        gathered = comm.gather(tensors, dim, destination)
        note_streams(ctx, ctx.slots, [gathered.device])
        ctx.is_unpacked_here = False
        if _compute_apart(ctx.slots, ctx.settings) and _torch.top_saved_tensors_hooks(True) is not None:
            ctx.save_for_backward(gathered.new_empty(0))
            ctx.is_unpacked_here = True
        ctx.sizes = [tensor.shape[dim] for tensor in tensors]
        return alias(gathered, 0) if len(tensors) == 1 else gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (2 + len(ctx.slots))
        with on_streams_of(ctx, [grad]), settings.held(ctx.settings):
            if ctx.is_unpacked_here:
                # A checkpoint around the wrapper then recomputes here, once: left to the replicas' nodes, the engine's
                # threads for their devices would all start to recompute the same region, and with isolated slots the
                # first of their streams would be the caller's.
                _ = ctx.saved_tensors
            if _on_distinct_accelerators(ctx.slots):
                _restore_cpu_generator_after_backward()
            if torch.is_grad_enabled():
                chunks = Scatter.apply(ctx.slots, ctx.sizes, ctx.dim, grad)
            else:
                chunks = comm.scatter(grad, ctx.slots, ctx.sizes, ctx.dim)
        if ctx.scalars:
            chunks = tuple(chunk.reshape(()) for chunk in chunks)
        return (None, None, *chunks)


def _on_distinct_accelerators(slots: Sequence[torch.device]) -> bool:
    """Whether a backward over these slots runs in several threads of the engine."""
    return len({slot for slot in slots if slot != CPU}) > 1


def _compute_apart(slots: Sequence[torch.device], asked: settings.Settings) -> bool:
    """Whether slots have distinct accelerators, or streams of their own on one."""
    return _on_distinct_accelerators(slots) or (asked.isolated and slots[0] != CPU and len(slots) > 1)


# Long enough for all backward passes that run at a time; one that fails leaves its number behind.
_generator_guards: deque[int] = deque(maxlen=64)
_generator_guards_lock = threading.Lock()


def _restore_cpu_generator_after_backward() -> None:
    """Makes the CPU generator, when the running backward ends, what it is now.

    torch's checkpointing saves, sets and restores the CPU generator around each recomputation. With distinct
    devices several engine threads do so at once and the last one may restore what another has set, so that shuffles
    and seeds repeat. On one device each recomputation leaves the generator as it found it: so does this, for all.
    Draws by hooks of the user in the same backward are taken back with them.
    """
    if "torch.utils.checkpoint" not in sys.modules:
        return
    task = _torch.current_graph_task_id()
    with _generator_guards_lock:
        # The first gather of a backward pass sees the generator before any recomputation; later ones may not.
        if task in _generator_guards:
            return
        _generator_guards.append(task)
    state = torch.get_rng_state()
    _torch.queue_callback(lambda: torch.set_rng_state(state))
