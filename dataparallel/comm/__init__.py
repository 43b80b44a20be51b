"""Moving tensors between the devices of one process: plain functions, which know no modules and record no graph.

Names and arguments are those of ``torch.nn.parallel.comm``; devices are anything that ``dataparallel.devices`` accepts.
Within one device nothing is copied unless the caller needs its own storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.comm.buckets import DEFAULT_CAP_BYTES, Bucket, Planned, flatten, send_packed
from dataparallel.comm.checks import (
    check_chunk_sizes,
    check_exactly_one,
    check_movable,
    check_out,
    check_summable,
    near_equal_sizes,
    resized,
    why_not_gatherable,
)
from dataparallel.comm.settings import using
from dataparallel.comm.tables import TensorRow, copies
from dataparallel.comm.transport import Allocate, Later
from dataparallel.comm.transport_choice import transport_for
from dataparallel.devices import CPU, DeviceLike, resolve, resolve_each

__all__ = [
    "add_flat",
    "broadcast",
    "broadcast_coalesced",
    "copy_each",
    "gather",
    "near_equal_sizes",
    "reduce_add",
    "reduce_add_coalesced",
    "reduce_scatter",
    "scatter",
    "scatter_coalesced",
    "using",
]


@torch.no_grad()
@_torch.not_traced
def broadcast(
    tensor: Tensor, devices: Sequence[DeviceLike] | None = None, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """The tensor on each of ``devices``, or copied into each of ``out`` (exactly one of them is given).

    Shape, dtype, class and, unless memory has holes, strides are kept. The result for the tensor's own device is the
    tensor itself.

    Raises:
        ValueError: both or none of ``devices`` and ``out``, a shape in ``out`` that differs, a meta or lazy tensor.
    """
    check_movable([tensor])
    check_exactly_one(devices, out)
    if out is not None:
        check_out(out, [tensor.shape] * len(out))
        transport = transport_for("broadcast", [tensor.device, *(target.device for target in out)], [tensor])
        transport.broadcast_into(out, tensor)
        return tuple(out)
    assert devices is not None
    slots = resolve_each(devices)
    transport = transport_for("broadcast", [tensor.device, *slots], [tensor])
    return tuple(copy for (copy,) in transport.broadcast_coalesced([tensor], slots, own=False))


@torch.no_grad()
@_torch.not_traced
def broadcast_coalesced(
    tensors: Sequence[Tensor],
    devices: Sequence[DeviceLike],
    buffer_size: int = DEFAULT_CAP_BYTES,
    *,
    own_storage: bool = False,
    planned: Planned | None = None,
    later: Later | None = None,
) -> list[list[Tensor]]:
    """A list of tensors for each of ``devices``. Tensors that move travel in flat buffers of ``buffer_size`` bytes.

    Args:
        tensors: any mix of dtypes, shapes and strides, sparse and complex ones included.
        devices: slots; slots on one device share the copies there.
        buffer_size: above 0.
        own_storage: every slot but the first gets storage that nothing else uses.
        planned: the result of ``comm.buckets.plan_buckets`` for these tensors and this size, if the caller has it.
        later: receives the broadcast of each flat buffer. The caller launches it; until then the results have no
            values. Not with ``own_storage``.

    Raises:
        ValueError: a meta or lazy tensor, a device that does not exist.
    """
    check_movable(tensors)
    slots, buffer_size = resolve_each(devices), checked("buffer_size", buffer_size, int, above=0)
    transport = transport_for("broadcast", [*(tensor.device for tensor in tensors), *slots], tensors, buffer_size)
    return transport.broadcast_coalesced(tensors, slots, buffer_size, own=own_storage, planned=planned, later=later)


@torch.no_grad()
def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies source i into target i, on the current streams.

    Source i and target i have the same shape; all have one dtype. All targets are on one device, whose stream waits for
    the copies. The streams of the sources may go on when the sources have been read.
    """
    transport = transport_for("gather", [tensor.device for tensor in (*targets, *sources)], sources)
    transport.copy_each(targets, sources)


@torch.no_grad()
def reduce_scatter(matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Allocate = torch.empty_like) -> None:
    """Copies row j of the sum of ``matrices``, added in the order given, into ``out[j]``, on the current streams.

    The matrices are contiguous, of one shape and dtype. The dtype of ``out``, in which terms are added, may be wider.
    ``empty`` allocates a buffer that receives a row, like the row and on a device.
    """
    rows = [TensorRow(target, [matrix[at] for matrix in matrices]) for at, target in enumerate(out)]
    devices = [tensor.device for tensor in (*out, *matrices)]
    transport_for("reduce_scatter", devices, matrices[:1]).execute(rows, empty)


@torch.no_grad()
@_torch.not_traced
def reduce_add(inputs: Sequence[Tensor], destination: DeviceLike | None = None) -> Tensor:
    """The sum of the tensors, added in the order given, on ``destination`` (default: the first tensor's device).

    A single tensor there is returned as it is.

    Raises:
        ValueError: no tensor, shapes or dtypes that differ (the message says which).
    """
    inputs = list(inputs)
    check_summable(inputs)
    target = inputs[0].device if destination is None else resolve(destination)
    transport = transport_for("reduce_add", [target, *(tensor.device for tensor in inputs)], inputs[:1])
    (total,) = transport.reduce_add_coalesced([[tensor] for tensor in inputs], target)
    return total


@torch.no_grad()
@_torch.not_traced
def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]],
    destination: DeviceLike | None = None,
    buffer_size: int = DEFAULT_CAP_BYTES,
) -> tuple[Tensor, ...]:
    """For each position the sum over slots, added in slot order, on ``destination`` (default: the first device).

    ``inputs`` has one list of tensors for each slot. Dense tensors travel in flat buffers of ``buffer_size`` bytes.

    Raises:
        ValueError: no slot, lists of different lengths, shapes or dtypes that differ within one position.
    """
    if not inputs:
        raise ValueError("reduce_add_coalesced needs the tensors of at least one slot; got none")
    buffer_size = checked("buffer_size", buffer_size, int, above=0)
    lengths = [len(tensors) for tensors in inputs]
    if len(set(lengths)) > 1:
        raise ValueError(f"every slot must bring the same number of tensors; got {lengths}")
    if lengths[0] == 0:
        return ()
    for position, terms in enumerate(zip(*inputs, strict=True)):
        check_summable(terms, f" at position {position}")
    target = inputs[0][0].device if destination is None else resolve(destination)
    devices = [target, *(tensors[0].device for tensors in inputs)]
    transport = transport_for("reduce_add", devices, inputs[0], buffer_size)
    return tuple(transport.reduce_add_coalesced(inputs, target, buffer_size))


@torch.no_grad()
def add_flat(
    flats: Sequence[Tensor],
    destination: torch.device,
    *,
    travelling: Callable[[Sequence[Tensor]], AbstractContextManager[None]] | None = None,
) -> Tensor:
    """The sum of flat buffers of one size and dtype, in the order given. It may overwrite the buffers.

    ``travelling`` opens the context in which buffers are copied and added, and may make other streams current. Its
    argument lists all buffers that are used there.
    """
    transport = transport_for("reduce_add", [destination, *(flat.device for flat in flats)], flats[:1])
    if travelling is None:
        return transport.add_up(flats, destination)
    # The sum's memory is allocated outside of the context, so that it belongs to the caller's current stream.
    total = flats[0] if flats[0].device == destination else torch.empty_like(flats[0], device=destination)
    with travelling([*flats, total]):
        added = transport.add_up(flats, destination)
        if added.data_ptr() != total.data_ptr():
            total.copy_(added)
    return total


@torch.no_grad()
@_torch.not_traced
def scatter(
    tensor: Tensor,
    devices: Sequence[DeviceLike] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Consecutive chunks of ``tensor`` along ``dim``, one on each device (or copied into ``out``).

    Without ``chunk_sizes`` the chunks are near-equal (`near_equal_sizes`); a small tensor has fewer chunks than there
    are devices. Chunks that stay on the tensor's device are views.

    Raises:
        IndexError: the tensor has no dimension ``dim``.
        ValueError: ``chunk_sizes`` or ``out`` that do not add up, both or none of ``devices`` and ``out``.
    """
    check_movable([tensor])
    if not -tensor.dim() <= (dim := checked("dim", dim, int)) < tensor.dim():
        raise IndexError(f"cannot scatter a tensor of shape {tuple(tensor.shape)} along dimension {dim}")
    check_exactly_one(devices, out)
    if out is not None:
        if chunk_sizes is not None:
            raise ValueError("chunk_sizes follow from the sizes of out; pass only one of them")
        sizes = [target.shape[dim] if target.dim() == tensor.dim() else 0 for target in out]
        check_out(out, [resized(tensor.shape, dim, size) for size in sizes])
        if sum(sizes) != tensor.shape[dim]:
            raise ValueError(
                f"the sizes of out along dimension {dim} add up to {sum(sizes)}, the tensor has {tensor.shape[dim]}"
            )
        transport = transport_for("scatter", [tensor.device, *(target.device for target in out)], [tensor])
        transport.execute(copies(out, torch.split(tensor, sizes, dim)))
        return tuple(out)
    assert devices is not None
    slots = resolve_each(devices)
    if chunk_sizes is None:
        sizes = near_equal_sizes(tensor.shape[dim], len(slots))
    else:
        sizes = check_chunk_sizes(chunk_sizes, len(slots), tensor.shape[dim])
    used = slots[: len(sizes)]
    transport = transport_for("scatter", [tensor.device, *used], [tensor])
    return tuple(transport.scatter(tensor, used, sizes, dim))


def scatter_coalesced(
    tensors: Sequence[Tensor], slots: Sequence[torch.device], sizes: Sequence[int], dim: int
) -> list[list[Tensor]]:
    """The chunks of each tensor, of these sizes. All are on one device, and `travels_flat` is true for each.

    What one slot gets travels in a flat buffer for each dtype. Then each chunk gets memory of its own. The function
    records what the caller records.
    """
    transport = transport_for("scatter", [tensors[0].device, *slots], tensors[:1])
    split = [torch.split_with_sizes(Tensor.detach(tensor), list(sizes), dim) for tensor in tensors]
    by_slot = [[*chunks] for chunks in zip(*split, strict=True)]
    away = [slot for slot, device in enumerate(slots) if device != tensors[0].device]

    def send(at: int, bucket: Bucket, chunks: Sequence[Tensor]) -> Tensor:
        return transport.to_device(flatten(bucket, chunks), slots[away[at]])

    received = send_packed([by_slot[slot] for slot in away], [sizes[slot] for slot in away], send)
    for slot, chunks in zip(away, received, strict=True):
        by_slot[slot] = chunks
    return [[*chunks] for chunks in zip(*by_slot, strict=True)]


@torch.no_grad()
@_torch.not_traced
def gather(
    tensors: Sequence[Tensor],
    dim: int = 0,
    destination: DeviceLike | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The tensors one after the other along ``dim``, on ``destination`` (default: the first's device) or in ``out``.

    A result on the CPU is complete when the call returns. -1 means the CPU, as it does in torch.

    Raises:
        IndexError: there is no dimension ``dim``.
        ValueError: no tensor, shapes that differ elsewhere, dtypes that differ, both ``destination`` and ``out``.
    """
    tensors = list(tensors)
    if not tensors:
        raise ValueError("gather needs at least one tensor; got none")
    check_movable(tensors)
    first, dim = tensors[0], checked("dim", dim, int)
    if problem := why_not_gatherable(tensors, dim):
        raise ValueError(f"cannot gather: {problem}")
    if not -first.dim() <= dim < first.dim():
        raise IndexError(f"cannot gather tensors of shape {tuple(first.shape)} along dimension {dim}")
    if out is None:
        if destination is None:
            target = first.device
        else:
            target = CPU if destination == -1 else resolve(destination)
        transport = transport_for("gather", [target, *(tensor.device for tensor in tensors)], tensors)
        return transport.gather(tensors, dim % first.dim(), target)
    if destination is not None:
        raise ValueError("out has a device already; pass only one of destination and out")
    check_movable([out])
    sizes = [tensor.shape[dim] for tensor in tensors]
    shape = tuple(resized(first.shape, dim, sum(sizes)))
    if out.dtype != first.dtype or out.shape != shape:
        raise ValueError(
            f"out has shape {tuple(out.shape)} and {out.dtype}, the gathered tensors {shape} and {first.dtype}"
        )
    transport = transport_for("gather", [out.device, *(tensor.device for tensor in tensors)], tensors)
    transport.execute(copies(torch.split(out, sizes, dim), tensors))
    return out
