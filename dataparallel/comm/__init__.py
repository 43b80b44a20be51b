"""Moving tensors between the devices of one process: plain functions.

This file checks arguments and says what results look like; ``comm.select`` beside it says what carries a call, and how
tensors travel is a file each. The room knows no module and no autograd: gradients are not recorded here,
``dataparallel.autograd.functions`` does that. Names and arguments are those of ``torch.nn.parallel.comm``; devices are
anything that ``dataparallel.devices`` accepts, the CPU included. On one device nothing is copied unless the caller
needs its own storage, or slots are isolated, which is for tests (``dataparallel.testing.isolated_slots``). `using`
says how tensors travel where the library's choice is not wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dataparallel.comm import copies, topology
from dataparallel.comm.buckets import DEFAULT_CAP_BYTES, Planned
from dataparallel.comm.checks import (
    check_chunk_sizes,
    check_exactly_one,
    check_movable,
    check_summable,
    near_equal_sizes,
    why_not_gatherable,
)
from dataparallel.comm.choice import Choice, Collective
from dataparallel.comm.cupy import transport as kernels
from dataparallel.comm.cupy.transport import Kernels
from dataparallel.comm.routes import Travelling
from dataparallel.comm.select import choose_for, transport_for
from dataparallel.comm.settings import are_slots_isolated, using
from dataparallel.comm.topology import Topology
from dataparallel.devices import CPU, DeviceLike, resolve, resolve_each

__all__ = [
    "Choice",
    "add_flat",
    "broadcast",
    "broadcast_coalesced",
    "choose_transport",
    "gather",
    "near_equal_sizes",
    "reduce_add",
    "reduce_add_coalesced",
    "scatter",
    "sums_travel_flat",
    "using",
]

_TYPICAL_BYTES, _TYPICAL_COUNT = 25 * 2**20, 100
"""A bucket of a model."""


def choose_transport(
    devices: Sequence[torch.device], known: Topology | None = None, work: Collective = "broadcast"
) -> Choice:
    """How a bucket of parameters would travel between the first of ``devices`` and the others, and the reason.

    Args:
        devices: accelerators, or the CPU several times.
        known: what lies between them, where it must not be asked of the devices themselves.
        work: what is done.

    Raises:
        ValueError: a transport that was asked for can carry nothing between them, or is unknown.
    """
    return choose_for(work, topology.of(devices) if known is None else known, _TYPICAL_BYTES, _TYPICAL_COUNT)


@torch.no_grad()
def broadcast(
    tensor: Tensor, devices: Sequence[DeviceLike] | None = None, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """The tensor on each of ``devices``, or copied into each of ``out`` (exactly one of them is given).

    Shape, strides (where memory has no holes), dtype and class are kept. Where the tensor is on a device already,
    the result for that device is the tensor itself.

    Raises:
        ValueError: both or none of ``devices`` and ``out``, a shape in ``out`` that differs, a meta or lazy tensor.
    """
    check_movable([tensor])
    check_exactly_one(devices, out)
    if devices is not None:
        slots = resolve_each(devices)
        transport = transport_for("broadcast", _places([tensor.device], slots), [tensor])
        own = are_slots_isolated()
        if isinstance(transport, Kernels):
            return tuple(copy for (copy,) in kernels.broadcast_coalesced([tensor], slots, own=own))
        return tuple(copies.broadcast(tensor, slots, own=own, transport=transport))
    assert out is not None
    check_movable(out)
    for index, target in enumerate(out):
        if target.shape != tensor.shape:
            raise ValueError(
                f"out[{index}] has shape {tuple(target.shape)}, the tensor to broadcast {tuple(tensor.shape)}"
            )
    transport = transport_for("broadcast", _places([tensor.device], [target.device for target in out]), [tensor])
    if isinstance(transport, Kernels):
        kernels.broadcast_into(out, tensor)
    else:
        copies.broadcast_into(out, tensor, transport)
    return tuple(out)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Sequence[Tensor],
    devices: Sequence[DeviceLike],
    buffer_size: int = DEFAULT_CAP_BYTES,
    *,
    own_storage: bool = False,
    planned: Planned | None = None,
) -> list[list[Tensor]]:
    """A list of tensors for each of ``devices``; those that move travel in flat buffers of ``buffer_size`` bytes.

    Args:
        tensors: any mix of dtypes, shapes, strides, sparse and complex ones.
        devices: slots; several on one device share what was copied there.
        buffer_size: above 0.
        own_storage: every slot but the first gets storage that nothing else uses.
        planned: what ``comm.buckets.plan_buckets`` has made of these tensors with this size, where the caller has it.

    Raises:
        ValueError: a meta or lazy tensor, a device that does not exist.
    """
    check_movable(tensors)
    slots = resolve_each(devices)
    transport = transport_for("broadcast", _places([tensor.device for tensor in tensors], slots), tensors)
    isolated = are_slots_isolated()
    if isinstance(transport, Kernels):
        return kernels.broadcast_coalesced(tensors, slots, buffer_size, own=own_storage or isolated)
    return copies.broadcast_coalesced(
        tensors, slots, buffer_size, own=own_storage, isolated=isolated, transport=transport, planned=planned
    )


@torch.no_grad()
def reduce_add(inputs: Sequence[Tensor], destination: DeviceLike | None = None) -> Tensor:
    """The sum of the tensors, added in the order given, on ``destination`` (default: the first tensor's device).

    One tensor that is there already is handed through.

    Raises:
        ValueError: no tensor, shapes or dtypes that differ (the message says which).
    """
    inputs = list(inputs)
    check_summable(inputs)
    target = inputs[0].device if destination is None else resolve(destination)
    transport = transport_for("reduce_add", _places([target], [tensor.device for tensor in inputs]), inputs[:1])
    if isinstance(transport, Kernels):
        return kernels.reduce_add_coalesced([[tensor] for tensor in inputs], target)[0]
    return copies.reduce_add(inputs, target, transport, isolated=are_slots_isolated())


@torch.no_grad()
def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]],
    destination: DeviceLike | None = None,
    buffer_size: int = DEFAULT_CAP_BYTES,
    *,
    travelling: Travelling | None = None,
) -> tuple[Tensor, ...]:
    """For each position the sum over slots, added in slot order, on ``destination`` (default: the first device).

    Args:
        inputs: one list of tensors for each slot, all of one length.
        destination: a device.
        buffer_size: size in bytes of the flat buffers in which dense tensors travel; above 0.
        travelling: opens a context in which flat buffers travel and are added, for other streams to be current there;
            it is given all buffers that are used there. Kernels, which know no flat buffers, run outside.

    Raises:
        ValueError: no slot, lists of different lengths, shapes or dtypes that differ within one position.
    """
    if not inputs:
        raise ValueError("reduce_add_coalesced needs the tensors of at least one slot; got none")
    lengths = [len(tensors) for tensors in inputs]
    if len(set(lengths)) > 1:
        raise ValueError(f"every slot must bring the same number of tensors; got {lengths}")
    if lengths[0] == 0:
        return ()
    for tensors in inputs:
        check_movable(tensors)
    shapes = [[tensor.shape for tensor in tensors] for tensors in inputs]
    dtypes = [[tensor.dtype for tensor in tensors] for tensors in inputs]
    if any(of_slot != shapes[0] for of_slot in shapes) or any(of_slot != dtypes[0] for of_slot in dtypes):
        for position, terms in enumerate(zip(*inputs, strict=True)):
            check_summable(terms, f" at position {position}")
    target = inputs[0][0].device if destination is None else resolve(destination)
    transport = transport_for("reduce_add", _places([target], [tensors[0].device for tensors in inputs]), inputs[0])
    if isinstance(transport, Kernels):
        return tuple(kernels.reduce_add_coalesced(inputs, target))
    isolated = are_slots_isolated()
    return tuple(copies.reduce_add_coalesced(inputs, target, buffer_size, transport, travelling, isolated=isolated))


def sums_travel_flat(slots: Sequence[torch.device], tensors: Sequence[Tensor]) -> bool:
    """Whether gradients of ``tensors``, on each of ``slots``, travel in flat buffers to where the tensors are.

    They do not where all are on one device already, and where kernels read them where they are.
    """
    source = tensors[0].device
    if all(slot == source for slot in slots) and not are_slots_isolated():
        return False
    return not isinstance(transport_for("reduce_add", _places([source], slots), tensors), Kernels)


@torch.no_grad()
def add_flat(flats: Sequence[Tensor], destination: torch.device, *, travelling: Travelling | None = None) -> Tensor:
    """The sum of flat buffers of one size and dtype, in the order given. They are the caller's to give away.

    ``travelling``: see `reduce_add_coalesced`.
    """
    transport = transport_for("reduce_add", _places([destination], [flat.device for flat in flats]), flats[:1])
    if isinstance(transport, Kernels):
        return kernels.reduce_add_coalesced([[flat] for flat in flats], destination)[0]
    return copies.add_flat(flats, destination, transport, travelling, isolated=are_slots_isolated())


@torch.no_grad()
def scatter(
    tensor: Tensor,
    devices: Sequence[DeviceLike] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Consecutive chunks of ``tensor`` along ``dim``, one on each device (or copied into ``out``).

    Without ``chunk_sizes`` the chunks are near-equal (`near_equal_sizes`), and there are fewer of them than devices
    where the tensor is small. Chunks that need not move are views.

    Raises:
        IndexError: the tensor has no dimension ``dim``.
        ValueError: ``chunk_sizes`` or ``out`` that do not add up, both or none of ``devices`` and ``out``.
    """
    check_movable([tensor])
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"cannot scatter a tensor of shape {tuple(tensor.shape)} along dimension {dim}")
    check_exactly_one(devices, out)
    if out is not None:
        return _scatter_into(tensor, out, chunk_sizes, dim)
    assert devices is not None
    slots = resolve_each(devices)
    if chunk_sizes is None:
        sizes = near_equal_sizes(tensor.shape[dim], len(slots))
    else:
        sizes = check_chunk_sizes(chunk_sizes, len(slots), tensor.shape[dim])
    slots = slots[: len(sizes)]
    transport = transport_for("scatter", _places([tensor.device], slots), [tensor])
    return tuple(copies.scatter(tensor, slots, sizes, dim, transport, own=are_slots_isolated()))


def _scatter_into(
    tensor: Tensor, out: Sequence[Tensor], chunk_sizes: Sequence[int] | None, dim: int
) -> tuple[Tensor, ...]:
    if chunk_sizes is not None:
        raise ValueError("chunk_sizes follow from the sizes of out; pass only one of them")
    check_movable(out)
    chunk = list(tensor.shape)
    for index, target in enumerate(out):
        if target.dim() == tensor.dim():
            chunk[dim] = target.shape[dim]
        if list(target.shape) != chunk:
            raise ValueError(f"out[{index}] has shape {tuple(target.shape)}, its chunk has {tuple(chunk)}")
    total = sum(target.shape[dim] for target in out)
    if total != tensor.shape[dim]:
        raise ValueError(
            f"the sizes of out along dimension {dim} add up to {total}, the tensor has {tensor.shape[dim]}"
        )
    transport = transport_for("scatter", _places([tensor.device], [target.device for target in out]), [tensor])
    for target, part in zip(out, torch.split(tensor, [t.shape[dim] for t in out], dim), strict=True):
        transport.copy(target, part)
    return tuple(out)


@torch.no_grad()
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
    first = tensors[0]
    problem = why_not_gatherable(tensors, dim)
    if problem:
        raise ValueError(f"cannot gather: {problem}")
    if not -first.dim() <= dim < first.dim():
        raise IndexError(f"cannot gather tensors of shape {tuple(first.shape)} along dimension {dim}")
    if out is None:
        if destination is None:
            target = first.device
        else:
            target = CPU if destination == -1 else resolve(destination)
        transport = transport_for("gather", _places([target], [tensor.device for tensor in tensors]), tensors)
        return copies.gather(tensors, dim % first.dim(), target, transport)
    if destination is not None:
        raise ValueError("out has a device already; pass only one of destination and out")
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    check_movable([out])
    if out.dtype != first.dtype:
        raise ValueError(f"out has dtype {out.dtype}, the gathered tensors {first.dtype}")
    if list(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the gathered tensors {tuple(shape)}")
    transport = transport_for("gather", _places([out.device], [tensor.device for tensor in tensors]), tensors)
    return copies.gather_into(out, tensors, dim, transport)


def _places(ends: Sequence[torch.device], slots: Sequence[torch.device]) -> list[torch.device]:
    """The slots, after those devices at the other end that are no slots."""
    return [*dict.fromkeys(end for end in ends if end not in slots), *slots]
