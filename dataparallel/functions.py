"""``comm`` as autograd functions: Broadcast, ReduceAdd, ReduceAddCoalesced, Scatter, Gather.

Each is one node whose backward is another of them, so all are twice differentiable; with one node for all
devices, a backward pass reaches every device at once instead of one after the other. Gradients are ``None`` where
every slot's gradient is ``None``, else the sum, in slot order, of those that there are. Nested structures are
``scatter_gather``'s business, modules ``replicate``'s.

Inside a backward that is not itself recorded the plain functions of ``comm`` are called: they hand one tensor to
several places as the same object, from which torch sees that it must not be kept as anybody's ``.grad``.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch.autograd import Function

from dataparallel import comm
from dataparallel.comm import settings
from dataparallel.devices import CPU, DeviceLike, resolve_each
from dataparallel.hand_over import HandOver, sum_as_soon_as_ready
from dataparallel.ranges import stage
from dataparallel.side_streams import BesideBackward, current, side_stream
from dataparallel.slot_streams import SlotStream, slot_streams

__all__ = [
    "Broadcast",
    "Gather",
    "ReduceAdd",
    "ReduceAddCoalesced",
    "Scatter",
    "alias",
    "broadcast_summed_beside",
    "current_streams",
]

_ONE_BUFFER = sys.maxsize
"""Tensors of one call, and one dtype, travel as one flat buffer; callers with many make calls of a bucket each."""


def alias(tensor: Tensor, slot: int) -> Tensor:
    """Another tensor object on the same memory, of the same class, with the same Python attributes, without graph.

    For slot 0 it keeps the version counter, by which autograd notices that the source changes before backward. Those of
    other slots have their own, or what one replica changes in place would seem to have changed in all.
    """
    return comm.copies.same_kind(tensor.data if slot else tensor.detach(), tensor)


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
        ctx.streams = current_streams(slots)
        ctx.beside = None
        ctx.slot_streams = slot_streams(slots)
        ctx.settings = settings.current()  # backward may run in a thread that knows nothing of the caller's
        ctx.sources = [tensor.device for tensor in tensors]
        sum_as_soon_as_ready(ctx)
        outputs = comm.broadcast_coalesced(tensors, slots, _ONE_BUFFER)
        already_there = set(ctx.sources)
        for slot, device in enumerate(slots):
            if device in slots[:slot]:
                outputs[slot] = [alias(output, slot) for output in outputs[slot]]
            elif device in already_there:
                outputs[slot] = [
                    alias(output, slot) if output is tensor else output
                    for output, tensor in zip(outputs[slot], tensors, strict=True)
                ]
        constant = [i for i, needed in enumerate(ctx.needs_input_grad[1 : 1 + len(tensors)]) if not needed]
        ctx.mark_non_differentiable(*(on_slot[i] for on_slot in outputs for i in constant))
        return tuple(chain.from_iterable(outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # On the streams of the forward, which gradients were made on; this thread's own know nothing of them.
        with current(ctx.streams):
            return (None, *Broadcast._sums(ctx, grads))

    @staticmethod
    def _sums(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        count = len(ctx.sources)
        _wait_for_slot_streams(ctx.slot_streams, ctx.sources, grads)
        of_slots = [grads[k : k + count] for k in range(0, len(grads), count)]
        # Tensors whose gradients are present on the same slots, and whose sums go to one device, travel together.
        groups: dict[tuple[torch.device, tuple[bool, ...]], list[int]] = defaultdict(list)
        needed = ctx.needs_input_grad[1:]
        for i, (source, *of_tensor) in enumerate(zip(ctx.sources, *of_slots, strict=True)):
            if needed[i]:
                groups[source, tuple([grad is not None for grad in of_tensor])].append(i)
        sums: list[Tensor | None] = [None] * count
        for (source, present), indices in groups.items():
            inputs = [[of_slot[i] for i in indices] for of_slot in compress(of_slots, present)]
            if not inputs:
                continue
            with stage("reduce_add"), settings.held(ctx.settings):
                totals = _reduce(source, inputs, ctx.beside)
            # One slot's gradient alone is no sum: it may be the slot's own memory.
            if ctx.beside is not None and len(inputs) > 1 and not torch.is_grad_enabled():
                totals = HandOver.enveloped(totals, ctx.beside)
            for i, total in zip(indices, totals, strict=True):
                sums[i] = total
        return sums


def broadcast_summed_beside(
    devices: Sequence[torch.device],
    beside: BesideBackward,
    tensors: Sequence[Tensor],
    broadcast: Callable[..., tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, ...]:
    """`Broadcast` of tensors that are on one accelerator, whose gradients travel on side streams.

    In a backward that is itself recorded they travel on the streams of the forward. ``broadcast`` applies another kind
    of `Broadcast`.
    """
    with side_stream(tensors[0].device):
        views = HandOver.apply(*tensors)
    outputs = (broadcast or Broadcast.apply)(devices, *map(comm.copies.same_kind, views, tensors))
    node: Any = outputs[0].grad_fn
    node.beside = beside
    return outputs


def _reduce(
    destination: torch.device, inputs: list[list[Tensor | None]], beside: BesideBackward | None
) -> Sequence[Tensor]:
    if torch.is_grad_enabled():
        return ReduceAddCoalesced.apply(destination, len(inputs[0]), *chain.from_iterable(inputs))
    travelling = None if beside is None else beside.travelling
    return comm.reduce_add_coalesced(inputs, destination, _ONE_BUFFER, travelling=travelling)  # type: ignore[arg-type]


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
        return tuple(alias(t, 0) if len(inputs) == 1 else t for t in totals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        results: list[Tensor | None] = [None] * (len(ctx.slots) * ctx.count)
        if present:
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
        return alias(total, 0) if len(tensors) == 1 else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (1 + len(ctx.slots))
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
        ctx.streams = current_streams(chunk.device for chunk in chunks)
        ctx.slot_streams = slot_streams([chunk.device for chunk in chunks])
        ctx.chunks = [(chunk.shape, chunk.dtype, chunk.device) for chunk in chunks]
        return chunks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return None, None, None, None
        _wait_for_streams(ctx.streams, grads)
        _wait_for_slot_streams(ctx.slot_streams, [ctx.source], grads)
        whole = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(grads, ctx.chunks, strict=True)
        ]
        if not all(grad.is_sparse for grad in whole):
            whole = [grad.to_dense() if grad.is_sparse else grad for grad in whole]
        with settings.held(ctx.settings):
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
        ctx.is_unpacked_here = False
        if _compute_apart(ctx.slots, ctx.settings) and _autograd._top_saved_tensors_default_hooks(True) is not None:
            ctx.save_for_backward(gathered.new_empty(0))
            ctx.is_unpacked_here = True
        ctx.sizes = [tensor.shape[dim] for tensor in tensors]
        return alias(gathered, 0) if len(tensors) == 1 else gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (2 + len(ctx.slots))
        if ctx.is_unpacked_here:
            # A checkpoint around the wrapper then recomputes here, once: left to the replicas' nodes, the engine's
            # threads for their devices would all start to recompute the same region, and with isolated slots the first
            # of their streams would be the caller's.
            with settings.held(ctx.settings):
                _ = ctx.saved_tensors
        if _on_distinct_accelerators(ctx.slots):
            _restore_cpu_generator_after_backward()
        with settings.held(ctx.settings):
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


def current_streams(devices: Iterable[torch.device]) -> dict[torch.device, torch.Stream]:
    """The calling thread's current stream on each accelerator among ``devices``."""
    return {device: torch.accelerator.current_stream(device) for device in {*devices} if device != CPU}


def _wait_for_streams(streams: dict[torch.device, torch.Stream], grads: Sequence[Tensor | None]) -> None:
    """Orders what follows after the gradients that replicas made on ``streams``, those of the caller's forward.

    One engine thread sums the gradients of all devices. It has waited for the stream that wrote those of its own
    device; on the others it sees default streams, which know nothing of a caller's stream.
    """
    for device, stream in streams.items():
        here = torch.accelerator.current_stream(device)
        if here != stream:
            here.wait_stream(stream)
            for grad in grads:
                if grad is not None and grad.device == device:
                    for memory in (grad._indices(), grad._values()) if grad.is_sparse else (grad,):
                        memory.record_stream(here)


def _wait_for_slot_streams(
    slots: dict[int, SlotStream], destinations: Sequence[torch.device], grads: Sequence[Tensor | None]
) -> None:
    """As `_wait_for_streams`, after gradients of isolated slots that go to another device.

    On the device where they are summed the engine has waited for all streams that wrote them.
    """
    for own in slots.values():
        if own.stream.device not in destinations:
            _wait_for_streams({own.stream.device: own.stream}, grads)


def _restore_cpu_generator_after_backward() -> None:
    """Makes the CPU generator, when the running backward ends, what it is now.

    torch's checkpointing saves, sets and restores the CPU generator around each recomputation. With distinct
    devices several engine threads do so at once and the last one may restore what another has set, so that shuffles
    and seeds repeat. On one device each recomputation leaves the generator as it found it: so does this, for all.
    Draws by hooks of the user in the same backward are taken back with them.
    """
    if "torch.utils.checkpoint" not in sys.modules:
        return
    task = torch._C._current_graph_task_id()
    with _generator_guards_lock:
        # The first gather of a backward pass sees the generator before any recomputation; later ones may not.
        if task in _generator_guards:
            return
        _generator_guards.append(task)
    state = torch.get_rng_state()
    torch.autograd.Variable._execution_engine.queue_callback(lambda: torch.set_rng_state(state))
