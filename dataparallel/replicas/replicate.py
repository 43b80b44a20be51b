"""`replicate`: copies one module to each slot, from the source as it is then.

``kept_replicas`` has the replicas that later calls use again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dataparallel import _torch, comm
from dataparallel.autograd.bucket_gradients import FromWholeSource, GradientStreams, broadcast_bucket
from dataparallel.autograd.node import run_last
from dataparallel.comm.buckets import fill_buckets
from dataparallel.comm.kinds import alias
from dataparallel.comm.streams.arrivals import Arrivals, ExpectedArrivals, arrivals_for
from dataparallel.comm.streams.current import current_streams
from dataparallel.comm.transport import FlatBroadcast, Later
from dataparallel.devices import DeviceLike, resolve_slots
from dataparallel.replicas.build import build_replica, collector_paused
from dataparallel.replicas.compiled.calls import Compiled
from dataparallel.replicas.plan import ModulePlan, refuse_constants

M = TypeVar("M", bound=nn.Module)

BUCKET_CAP_MB = 25.0
"""Default size in MiB of the buckets in which parameters are sent and gradients are sent back."""

FIRST_BUCKET_BYTES = 2**20
"""1 MiB: the size of the bucket whose gradients come first."""


@_torch.not_traced
def replicate(
    network: M, devices: Sequence[DeviceLike], detach: bool = False, *, bucket_cap_mb: float = BUCKET_CAP_MB
) -> list[M]:
    """A copy of ``network`` for each of ``devices``. Its parameters and buffers should be on the first device.

    Args:
        network: a module without uninitialised parameters and without Python modules below ScriptModules.
        devices: the slots; a device may be listed more than once.
        detach: make copies without autograd.
        bucket_cap_mb: size in MiB of the buckets in which parameters are sent and gradients are sent back; above 0.

    Returns:
        The replicas, in slot order. Parameters that require gradients are outputs of one autograd node per bucket,
        whose backward sums gradients into the source. If no graph is recorded they are leaves that require gradients,
        for a ``forward`` that enables recording. Replica 0 shares the storage of the source's parameters and buffers.
        Other replicas on its device share the parameters and have their own buffers.

    Raises:
        RuntimeError: the tree cannot be replicated; the message names the module.
        TypeError, ValueError: devices as in ``dataparallel.devices.resolve_slots``; ``bucket_cap_mb`` is not above 0.
    """
    return make_replicas(network, resolve_slots(devices), cap_in_bytes(bucket_cap_mb), detach)


def make_replicas(
    network: Any,
    slots: list[torch.device],
    cap_bytes: int,
    detach: bool = False,
    root_call: Compiled | None = None,
    as_torch: bool = False,
) -> list[Any]:
    """`replicate`, for wrappers. ``root_call``: see `ModulePlan.of`.

    ``as_torch``: see `copy_tensors`. With ``detach`` replica 0 has the source's tensors, which may require gradients.
    """
    record = torch.is_grad_enabled() and not detach
    with collector_paused():
        plan = ModulePlan.of(network, root_call)
        plan.cycles = None  # only the caller knows how long the replicas are needed
        refuse_constants(plan, slots)
        is_at_root = all(tensor.device == slots[0] for tensor in plan.tensors)
        arrivals = arrivals_for(slots, plan.tensors) if is_at_root else None
        copies = copy_tensors(plan, slots, record, cap_bytes, arrivals, as_torch)
        if as_torch and detach and is_at_root:
            copies[0] = [*plan.tensors]
        if not record and not detach and not torch.is_inference_mode_enabled():
            make_leaves(plan, copies)
        return build_replicas(plan, copies, record, arrivals)


def build_replicas(plan: ModulePlan, copies: list[list[Tensor]], record: bool, arrivals: Arrivals | None) -> list[Any]:
    """A replica for each slot, with its tensors; see `build_replica`. ``arrivals``: they may still be on their way."""
    if arrivals is None:
        return [build_replica(plan, tensors, record) for tensors in copies]
    replicas = []
    for slot, tensors in enumerate(copies):
        expected = ExpectedArrivals()
        arrivals.expect(expected, slot, len(tensors) + len(plan.shared) + 1)
        replicas.append(build_replica(plan, tensors, record, expected))
    return replicas


def copy_tensors(
    plan: ModulePlan,
    slots: list[torch.device],
    record: bool,
    cap_bytes: int,
    arrivals: Arrivals | None = None,
    as_torch: bool = False,
) -> list[list[Tensor]]:
    """The plan's tensors for each slot.

    ``record``: those that require gradients are outputs of a broadcast. ``arrivals``: parameters may still be on their
    way when this returns. ``as_torch``: the gradient of a parameter that no replica used is zeros, if others have one.
    """
    copies: list[list[Tensor]] = [list(plan.tensors) for _ in slots]
    parameters = set(plan.parameters)
    recorded: list[int] = []
    constant: list[int] = []
    buffers: list[int] = []
    for i, tensor in enumerate(plan.tensors):
        (recorded if record and tensor.requires_grad else constant if i in parameters else buffers).append(i)
    late: list[FlatBroadcast] = []
    later = None if arrivals is None else late.append

    if recorded:
        hold = None if plan.cycles is None else plan.cycles.hold("backward")
        _broadcast_in_buckets(copies, plan.tensors, recorded, slots, cap_bytes, later, hold, as_torch)
    copy_constants(copies, plan, constant, slots, cap_bytes, later)
    copy_buffers(copies, plan, buffers, slots, cap_bytes)
    cloned = [i for i in recorded if i not in parameters]
    if arrivals is not None:
        # Modules are used in about the order in which they are registered.
        arrivals.launch(sorted(late, key=lambda broadcast: min(broadcast.indices)), plan.read_directly.union(cloned))
    for on_slot in copies[1:]:
        for i in cloned:
            on_slot[i] = Tensor.clone(on_slot[i])
    return copies


def copy_constants(
    copies: Sequence[list[Tensor]],
    plan: ModulePlan,
    indices: Sequence[int],
    slots: Sequence[torch.device],
    cap_bytes: int,
    later: Later | None,
) -> None:
    """Puts parameters that no graph records, at ``indices`` of the plan, into each slot's list in ``copies``.

    ``later``: see `comm.broadcast_coalesced`. Its positions are those in the plan.
    """
    sent = comm.broadcast_coalesced(
        [plan.tensors[i] for i in indices], slots, cap_bytes, later=at_positions(indices, later)
    )
    # Each replica has a tensor object of its own for a parameter, even if no graph records it. But all slots on one
    # device receive the same object, which is the source's on its device.
    for slot, (on_slot, received) in enumerate(zip(copies, sent, strict=True)):
        is_first = slots.index(slots[slot]) == slot
        for i, tensor in zip(indices, received, strict=True):
            is_new = is_first and tensor is not plan.tensors[i]
            on_slot[i] = tensor if is_new else alias(tensor, slot)


def copy_buffers(
    copies: Sequence[list[Tensor]],
    plan: ModulePlan,
    indices: Sequence[int],
    slots: Sequence[torch.device],
    cap_bytes: int,
) -> None:
    """Puts buffers, at ``indices`` of the plan, into each slot's list in ``copies``.

    Slot 0 has the source's memory, every other slot its own.
    """
    put(
        copies,
        indices,
        comm.broadcast_coalesced([plan.tensors[i] for i in indices], slots, cap_bytes, own_storage=True),
    )


def cap_in_bytes(mebibytes: float, argument: str = "bucket_cap_mb") -> int:
    """Converts an argument from MiB to bytes, at least 1. Raises ``ValueError`` if it is not above 0."""
    if not mebibytes > 0:
        raise ValueError(f"{argument}={mebibytes}: a bucket holds more than 0 MiB")
    return max(1, int(min(mebibytes * 2**20, sys.maxsize)))


def put(copies: Sequence[list[Tensor]], indices: Sequence[int], by_slot: Sequence[Sequence[Any]]) -> None:
    """Puts the tensors of each slot at ``indices`` of the slot's list in ``copies``."""
    for on_slot, tensors in zip(copies, by_slot, strict=True):
        for i, tensor in zip(indices, tensors, strict=True):
            on_slot[i] = tensor


def _broadcast_in_buckets(
    copies: Sequence[list[Tensor]],
    tensors: list[Tensor],
    recorded: Sequence[int],
    slots: list[torch.device],
    cap_bytes: int,
    later: Later | None,
    held: object,
    as_torch: bool,
) -> None:
    """Puts the tensors at the positions ``recorded`` on every slot, as outputs of one autograd node per bucket.

    ``held``: see `broadcast_bucket`. ``as_torch``: see `copy_tensors`.

    Buckets are filled from the last tensor to the first, because gradients of the last layers come first. The first
    bucket is small, so that sums start early. DistributedDataParallel does the same (Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", VLDB 2020). Here buckets grow step by step and shrink again at
    the end, because no computation is left to overlap with the sum of the last one, and a forward waits for the
    parameters in it.

    A tensor with hooks has a bucket of its own. Autograd runs the hooks of all tensors that a node leads to, and this
    node is reached only if a replica has used the tensor.
    """
    is_at_root = all(tensors[i].device == slots[0] for i in recorded)
    gradient_streams = GradientStreams.for_forward(slots, current_streams(slots)) if is_at_root else None
    buckets = fill_buckets(tensors, recorded[::-1], FIRST_BUCKET_BYTES, cap_bytes)
    handles: Sequence[Tensor] = ()
    if as_torch and is_at_root:
        handles = FromWholeSource.apply([*map(len, buckets)], *[tensors[i] for i in chain.from_iterable(buckets)])
        if gradient_streams is not None:
            run_last(handles[0].grad_fn)
    else:
        buckets = [*chain.from_iterable([_with_hooks_alone(tensors, each) for each in buckets])]
    for number, (indices, handle) in enumerate(zip_longest(buckets, handles)):
        streams = None if gradient_streams is None else gradient_streams.for_bucket(number)
        bucket, late = [tensors[i] for i in indices], at_positions(indices, later)
        put(copies, indices, broadcast_bucket(slots, bucket, streams, later=late, handle=handle, held=held))


def _with_hooks_alone(tensors: Sequence[Tensor], indices: list[int]) -> list[list[int]]:
    """Returns the positions as one group, and the position of each tensor that has hooks as a group of its own."""
    together, alone = [], []
    for i in indices:
        if _torch.hooks_of(tensors[i]) or _torch.hooks_after_accumulation_of(tensors[i]):
            alone.append([i])
        else:
            together.append(i)
    return [together, *alone] if together else alone


def at_positions(positions: Sequence[int], later: Later | None) -> Later | None:
    """``later`` for a list of the tensors at these positions of the plan. It gets positions of the plan."""
    if later is None:
        return None
    return lambda broadcast: later(broadcast._replace(indices=[positions[k] for k in broadcast.indices]))


def make_leaves(plan: ModulePlan, copies: list[list[Tensor]]) -> None:
    needed = [i for i in plan.parameters if plan.tensors[i].requires_grad and not plan.tensors[i].is_inference()]
    for tensors in copies:
        for i in needed:
            Tensor.requires_grad_(tensors[i])
