"""`Broadcast`, `Collect`, `ReduceAddCoalesced`, `Scatter` and `Gather`: ``comm`` as autograd functions, one node each.

Each backward calls another of these functions, so all are twice differentiable. A sum is ``None`` if every slot's
gradient is ``None``, else it adds the gradients that exist, in slot order. ``bucket_gradients`` has those of
buckets.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.node import Node, forward_streams_set, note_forward_streams, run_first
from dataparallel.autograd.pass_of_backward import running_pass
from dataparallel.comm import settings
from dataparallel.comm.buckets import Planned, has_strides, is_dense
from dataparallel.comm.kinds import alias, same_kind
from dataparallel.comm.streams.current import run_apart, streams_set
from dataparallel.comm.transport import Later
from dataparallel.devices import DeviceLike, resolve_each
from dataparallel.profiling import stage

_ONE_BUFFER = sys.maxsize
"""One buffer for all tensors of a call with one dtype. Callers with many tensors make one call per bucket."""


class Broadcast(Node):
    """``Broadcast.apply(devices, *tensors)``: the tensors on every slot, in one tuple, slot by slot.

    A result on the tensor's own device shares its memory. Backward sums over the slots as soon as the last gradient has
    arrived.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[DeviceLike], *tensors: Tensor) -> tuple[Tensor, ...]:
        slots = resolve_each(devices)
        ctx.set_materialize_grads(False)
        ctx.slots = slots
        ctx.settings = settings.current()  # backward may run in a thread without the caller's settings
        ctx.sources = [tensor.device for tensor in tensors]
        note_forward_streams(ctx, ctx.sources, slots)
        run_first(ctx)
        outputs = copies_for_slots(tensors, slots)
        constant = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if not needed]
        ctx.mark_non_differentiable(*(on_slot[i] for on_slot in outputs for i in constant))
        return tuple(chain.from_iterable(outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        count = len(ctx.sources)
        with forward_streams_set(ctx, grads):
            by_slot = [grads[k : k + count] for k in range(0, len(grads), count)]
            sums: list[Tensor | None] = [None] * count
            with stage("reduce_add"), settings.held(ctx.settings):
                for source in dict.fromkeys(ctx.sources):
                    indices = [i for i in range(count) if ctx.needs_input_grad[1 + i] and ctx.sources[i] == source]
                    totals = sums_over_slots([[slot_grads[i] for i in indices] for slot_grads in by_slot], source)
                    for i, total in zip(indices, totals, strict=True):
                        sums[i] = total
            return (None, *sums)


@torch.no_grad()
def copies_for_slots(
    tensors: Sequence[Tensor],
    slots: Sequence[torch.device],
    planned: Planned | None = None,
    later: Later | None = None,
) -> list[list[Tensor]]:
    """The tensors on every slot, as outputs for a node: each slot gets new tensor objects.

    ``planned``: the result of `plan_buckets` for the tensors as one bucket, if the caller has it. ``later``: see
    `comm.broadcast_coalesced`.
    """
    copies = comm.broadcast_coalesced(tensors, slots, _ONE_BUFFER, planned=planned, later=later)
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


def sums_over_slots(by_slot: Sequence[Sequence[Tensor | None]], destination: torch.device) -> list[Tensor | None]:
    """For each position the sum over slots, or ``None`` if every slot has ``None``. Grad mode records the sum.

    Gradients that exist on the same slots travel together.
    """
    groups: dict[tuple[bool, ...], list[int]] = defaultdict(list)
    for i, terms in enumerate(zip(*by_slot, strict=True)):
        groups[tuple([grad is not None for grad in terms])].append(i)
    sums: list[Tensor | None] = [None] * len(by_slot[0])
    for present, indices in groups.items():
        inputs: Any = [[slot_grads[i] for i in indices] for slot_grads in compress(by_slot, present)]
        if not inputs:
            continue
        if torch.is_grad_enabled():
            totals = ReduceAddCoalesced.apply(destination, len(indices), *chain.from_iterable(inputs))
        else:
            totals = comm.reduce_add_coalesced(inputs, destination, _ONE_BUFFER)
        for i, total in zip(indices, totals, strict=True):
            sums[i] = total
    return sums


class ReduceAddCoalesced(Node):
    """``ReduceAddCoalesced.apply(destination, count, *tensors)``: ``count`` sums over the slots.

    ``tensors`` lists ``count`` tensors of the first slot, then ``count`` of the second, and so on. Backward broadcasts.
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
        note_forward_streams(ctx, ctx.slots, [totals[0].device])
        return tuple(alias(t, 0) if len(inputs) == 1 else t for t in totals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        results: list[Tensor | None] = [None] * (len(ctx.slots) * ctx.count)
        if present:
            with forward_streams_set(ctx, grads):
                for k, slot_grads in enumerate(_broadcast_to_slots(ctx, [grads[i] for i in present])):
                    for i, grad in zip(present, slot_grads, strict=True):
                        results[k * ctx.count + i] = grad
        return (None, None, *results)


def _broadcast_to_slots(ctx: Any, tensors: list[Tensor | None]) -> list[Sequence[Tensor]]:
    with settings.held(ctx.settings):
        if torch.is_grad_enabled():
            flat = Broadcast.apply(ctx.slots, *tensors)
            return [flat[k : k + len(tensors)] for k in range(0, len(flat), len(tensors))]
        return comm.broadcast_coalesced(tensors, ctx.slots, _ONE_BUFFER)  # type: ignore[arg-type, return-value]


def own_chunks(chunks: Sequence[Tensor], slots: Sequence[torch.device], whole: Tensor) -> tuple[Tensor, ...]:
    """Returns the chunks of ``whole`` for the first ``slots``. Those that stay on its device are tensors on its memory.

    They were views, and autograd forbids in-place changes of views that a function returns. If a chunk would have holes
    and ``whole`` has none, it gets memory of its own, as on other devices: cuDNN refuses states with holes.
    """
    may_copy = has_strides(whole) and is_dense(whole.shape, whole.stride())
    own = []
    for k, (part, slot) in enumerate(zip(chunks, slots, strict=False)):
        if slot != whole.device:
            own.append(part)
        elif may_copy and not is_dense(part.shape, part.stride()):
            own.append(same_kind(Tensor.clone(part), part))
        else:
            own.append(alias(part, k))
    return tuple(own)


class Scatter(Node):
    """``Scatter.apply(devices, chunk_sizes, dim, tensor)``: consecutive chunks, one for each slot.

    ``chunk_sizes=None`` makes near-equal chunks. A chunk on the tensor's device shares its memory, unless it would have
    holes that the tensor has not. Backward gathers, with zeros for a slot without a gradient, unless no slot has one.
    """

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[DeviceLike], chunk_sizes: Sequence[int] | None, dim: int, tensor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        chunks = Scatter.unrecorded(devices, chunk_sizes, dim, tensor)
        ctx.source_device, ctx.dim, ctx.settings = tensor.device, dim, settings.current()
        note_forward_streams(ctx, [tensor.device], [chunk.device for chunk in chunks])
        ctx.chunks = [(chunk.shape, chunk.dtype, chunk.device) for chunk in chunks]
        return chunks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return None, None, None, None
        with forward_streams_set(ctx, grads), settings.held(ctx.settings):
            present = [
                torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
                for grad, (shape, dtype, device) in zip(grads, ctx.chunks, strict=True)
            ]
            if not all(grad.is_sparse for grad in present):
                present = [grad.to_dense() if grad.is_sparse else grad for grad in present]
            if torch.is_grad_enabled():
                return None, None, None, Gather.apply(ctx.source_device, ctx.dim, *present)
            return None, None, None, comm.gather(present, ctx.dim, ctx.source_device)

    @staticmethod
    def unrecorded(
        devices: Sequence[DeviceLike], chunk_sizes: Sequence[int] | None, dim: int, tensor: Tensor
    ) -> tuple[Tensor, ...]:
        """`apply` where no graph is recorded: a node takes longer than the copies of a small tensor."""
        chunks = comm.scatter(tensor, devices, chunk_sizes, dim)
        return own_chunks(chunks, [chunk.device for chunk in chunks], tensor)


class Gather(Node):
    """``Gather.apply(destination, dim, *tensors)``: the tensors, concatenated along ``dim``.

    0-dim tensors become a vector, whatever ``dim`` is. Backward scatters to all devices from this one node.
    """

    @staticmethod
    def forward(ctx: Any, destination: DeviceLike, dim: int, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.are_scalars = all(tensor.dim() == 0 for tensor in tensors)
        ctx.slots = [tensor.device for tensor in tensors]
        ctx.dim, ctx.settings = 0 if ctx.are_scalars else dim, settings.current()
        gathered = Gather.unrecorded(destination, dim, *tensors)
        note_forward_streams(ctx, ctx.slots, [gathered.device])
        note_whether_to_recompute(ctx, ctx.slots, gathered)
        ctx.sizes = [1 if ctx.are_scalars else tensor.shape[dim] for tensor in tensors]
        return gathered

    @staticmethod
    def unrecorded(destination: DeviceLike, dim: int, *tensors: Tensor) -> Tensor:
        """Returns what ``apply`` does, without a node: faster where no graph is recorded."""
        if all(tensor.dim() == 0 for tensor in tensors):
            dim, tensors = 0, tuple(Tensor.reshape(tensor, 1) for tensor in tensors)
        gathered = comm.gather(tensors, dim, destination)
        return alias(gathered, 0) if len(tensors) == 1 else gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (2 + len(ctx.slots))
        # This orders no further streams. The engine knows the stream from which the gradient leaves, and later work of
        # that stream comes after the copies. If the gradient leaves from host memory, the host waits for the copies.
        with streams_set(ctx.streams), settings.held(ctx.settings):
            recompute_here(ctx, ctx.slots)
            if torch.is_grad_enabled():
                chunks = Scatter.apply(ctx.slots, ctx.sizes, ctx.dim, grad)
            else:
                chunks = comm.scatter(grad, ctx.slots, ctx.sizes, ctx.dim)
        if ctx.are_scalars:
            chunks = tuple(chunk.reshape(()) for chunk in chunks)
        return (None, None, *chunks)


class Collect(Broadcast):
    """``Collect.apply(devices, *tensors)``: tensors of any devices, on the only one of ``devices``.

    Backward sends each gradient to the device of its tensor, from this one node.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[DeviceLike], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = Broadcast.forward(ctx, devices, *tensors)
        note_whether_to_recompute(ctx, ctx.sources, outputs[0])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # The recomputation reads no gradient. The end of `Broadcast.backward` orders the nodes that use its results.
        with streams_set(ctx.streams), settings.held(ctx.settings):
            recompute_here(ctx, ctx.sources)
        return Broadcast.backward(ctx, *grads)


# ---- checkpoints: recompute once, and restore the CPU generator ------------------------------------------------------

# Nodes that join the outputs of slots call these functions, because their backward runs before the replicas' nodes.


def restore_after_backward() -> None:
    """Notes the CPU generator's state, and restores it when the running backward pass ends.

    torch's checkpoints save, set and restore the state around each recomputation. On distinct accelerators several
    threads of the engine do so at the same time, and one may restore a state that another has set: then shuffles and
    seeds repeat. Called in a node's backward. It also undoes draws that the user's hooks make in the same pass.
    """
    if "torch.utils.checkpoint" not in sys.modules:
        return
    running = running_pass()
    # The first call in a pass sees the generator before any recomputation; later calls may not.
    if running.is_first(restore_after_backward):
        state = torch.get_rng_state()
        running.on_end(lambda ok: torch.set_rng_state(state) if ok else None)


def note_whether_to_recompute(ctx: Any, slots: Sequence[torch.device], output: Tensor) -> None:
    """Called in the forward of a node that joins the outputs of ``slots``; prepares `recompute_here`."""
    ctx.has_saved_tensor = run_apart(slots) and _torch.top_saved_tensors_hooks(True) is not None
    if ctx.has_saved_tensor:
        ctx.save_for_backward(output.new_empty(0))


def recompute_here(ctx: Any, slots: Sequence[torch.device]) -> None:
    """Called in the backward of such a node: makes a checkpoint around the wrapper recompute here, once.

    Otherwise the replicas' nodes, which run later, would make the engine's threads of all devices recompute the same
    region.
    """
    if ctx.has_saved_tensor:
        _ = ctx.saved_tensors  # the checkpoint's hook recomputes
    if run_apart(slots):
        restore_after_backward()
